-- include: wrong_types.lua
--
-- What each owner has in Redis, in bytes, so that no owner can fill it. Whatever an owner's requests leave (a job, a delivery, a
-- file, a batch) has an entry:
--
--   <ledger>:<owner>   zset: ids, by the time (unix, s) at which the entry is checked
--   <sizes>:<owner>    hash: the bytes of each id; `total`: their sum
--
-- The script that changes an object changes its entry too, so no end of a process can part the two. An object that expires
-- tells nobody: its entry is due then, and the next submission or sweep removes it. Entries of objects that do not expire are
-- checked once an hour, in case another tool has deleted them. So the sum cannot drift.
--
-- Nothing is entered for an owner without a limit. What was accepted without an entry never gets one.
--
-- A ledger is swept with its owner's list of jobs (sweep.lua), also when that has no job.

local ENTRY_CHECK_S = 3600

-- Return when an object that does not expire is checked.
local function later(now)
  return math.floor(now) + ENTRY_CHECK_S
end

-- Return the key whose end is the end of the object.
local function key_of(id)
  if string.sub(id, 1, #FILE_ID_) == FILE_ID_ then return FILE_ .. id .. _PARTS end
  if string.sub(id, 1, #BATCH_ID_) == BATCH_ID_ then return BATCH_ .. id end
  return JOB_ .. id
end

local function used_bytes(owner)
  return tonumber(try('hash', 'HGET', SIZES_OF_ .. owner, 'total') or '') or 0
end

local function read_size(owner, id)
  return tonumber(try('hash', 'HGET', SIZES_OF_ .. owner, id) or '') or 0
end

-- Enter the bytes of an object, which is checked at `due`. With `only_known`, leave out an object that has no entry.
local function write_size(owner, id, num_bytes, due, only_known)
  local sizes = SIZES_OF_ .. owner
  local known = try('hash', 'HMGET', sizes, id, 'total')
  if known and (known[1] or not only_known) and try('zset', 'ZADD', LEDGER_OF_ .. owner, due, id) then
    local total = (tonumber(known[2] or '') or 0) + num_bytes - (tonumber(known[1] or '') or 0)
    redis.call('HSET', sizes, id, num_bytes, 'total', total)
  end
end

-- Remove the entry of an object that is gone. With the last entry, the sum goes too.
local function remove_size(owner, id)
  local total = used_bytes(owner) - read_size(owner, id)
  if try('hash', 'HDEL', SIZES_OF_ .. owner, id) == 1 then redis.call('HSET', SIZES_OF_ .. owner, 'total', total) end
  if try('zset', 'ZREM', LEDGER_OF_ .. owner, id) == 1 and redis.call('EXISTS', LEDGER_OF_ .. owner) == 0 then
    redis.call('DEL', SIZES_OF_ .. owner)
  end
end

-- Check entries that are due. Return how many there were.
local function check_entries(owner, now, max_entries)
  local due = try('zset', 'ZRANGEBYSCORE', LEDGER_OF_ .. owner, '-inf', now, 'LIMIT', 0, max_entries) or {}
  for _, id in ipairs(due) do
    local ttl_ms = redis.call('PTTL', key_of(id))
    if ttl_ms == -2 then  -- absent
      remove_size(owner, id)
      try('zset', 'ZREM', JOBS_OF_ .. owner, id)
    else
      redis.call('ZADD', LEDGER_OF_ .. owner, ttl_ms < 0 and later(now) or now + math.floor(ttl_ms / 1000) + 1, id)
    end
  end
  return #due
end

-- Let the ledger of an owner be swept. submit.lua does so for its jobs.
local function schedule_check(owner, now)
  try('zset', 'ZADD', SWEEP_SCHEDULE, 'NX', math.floor(now) + 60, JOBS_OF_ .. owner)
end

-- Return the reply that refuses more bytes of an owner, or nil. `max_bytes` 0: no limit; -1: half of Redis's memory.
local function refuse_bytes(owner, num_bytes, max_bytes, limit, now)
  local most = max_bytes == -1 and math.floor(limit / 2) or max_bytes
  local used = used_bytes(owner)
  if most == 0 or used + num_bytes <= most then return nil end
  local first = try('zset', 'ZRANGE', LEDGER_OF_ .. owner, 0, 0, 'WITHSCORES') or {}
  return {'over_quota', 'bytes', used, num_bytes, most, math.ceil((tonumber(first[2] or '') or now) - now)}
end
