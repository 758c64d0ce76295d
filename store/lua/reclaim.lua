-- flags: allow-oom
-- include: lease.lua
-- include: wake.lua
--
-- Put the jobs of silent and of dead workers back at the front of their queues. No Retry is used up.
--
-- A worker is silent if its leases have expired: it sleeps, or it has lost its network. That says nothing about its jobs. A
-- worker is dead if somebody knows it: its process is gone from its machine, or it has reported the end of its engine. Any
-- of the jobs that a dead worker had in flight may have caused its death. Next time, each runs among half as many jobs (its
-- max_concurrency, the field `company`). Only the death of a worker that ran one job alone counts against that job
-- (`crashes`). A job with `crash_limit` crashes, or that its owner canceled, is leased to the caller, which ends it.
--
-- KEYS  list and wip registry of each queue
-- ARGV  crash_limit, id of the call, worker, lease_ms, grace_s, the shortest lease (ms), then the keys of the leases of dead
--       workers
-- Returns {number of jobs put back, rows (see lease.lua) of jobs to end, keys of a wrong type}.
local crash_limit, call_id, worker, lease_ms, grace_s = tonumber(ARGV[1]), unpack(ARGV, 2, 5)
local num_back, rows = 0, {}

local shortest_ms = tonumber(ARGV[6])

local held_by_dead, num_held = {}, #ARGV - 6
for i = 7, #ARGV do held_by_dead[ARGV[i]] = true end

-- Return the leases that may be over. Of many, those that were not extended for the length of a lease, by their scores (see
-- lease.lua), and some at random, because another client may have written a score.
local FEW_LEASES, NUM_AT_RANDOM = 100, 20
local function candidates(wip)
  if num_held > 0 or (try('zset', 'ZCARD', wip) or 0) <= FEW_LEASES then return try('zset', 'ZRANGE', wip, 0, -1) or {} end
  local found = redis.call('ZRANGEBYSCORE', wip, '-inf', now + grace_s - shortest_ms / 1000)
  local is_found = {}
  for _, lease_key in ipairs(found) do is_found[lease_key] = true end
  for _, lease_key in ipairs(redis.call('ZRANDMEMBER', wip, NUM_AT_RANDOM)) do
    if not is_found[lease_key] then found[#found + 1] = lease_key end
  end
  return found
end

-- Return whether Redis was away until less than a lease ago, and the lease was last extended before. Its worker may live: it
-- has not had the time to extend the lease.
local up_since
local function was_cut_short(wip, lease_key)
  if not up_since then
    local info = redis.pcall('INFO', 'server')  -- an error if this user may not ask: then Redis counts as up for long
    up_since = now - (tonumber(string.match(type(info) == 'string' and info or '', 'uptime_in_seconds:(%d+)') or '') or math.huge)
  end
  return now - up_since <= lease_ms / 1000 and tonumber(redis.call('ZSCORE', wip, lease_key)) - grace_s <= up_since
end

-- Find the leases that are over. The death of one worker says nothing about the leases of others.
local over = {}
for index = 1, #KEYS / 2 do
  local wip, is_usable = KEYS[2 * index], is_type(KEYS[2 * index - 1], 'list')
  for _, lease_key in ipairs(is_usable and candidates(wip) or {}) do
    local id, execution = string.match(lease_key, '^([%w_-]+):(.*)$')
    local ttl_ms = redis.call('PTTL', EXECUTION_ .. lease_key)
    local is_absent = ttl_ms == -2
    if held_by_dead[lease_key] or (is_absent and num_held == 0 and not was_cut_short(wip, lease_key)) then
      over[#over + 1] = {index = index, lease_key = lease_key, id = id, execution = execution}
    elseif ttl_ms == -1 then  -- another client wrote the key: let the lease end, unless its worker extends it
      redis.call('PEXPIRE', EXECUTION_ .. lease_key, lease_ms)
    end
  end
end

-- Count the death of its worker against a job; return its crashes, 0 if other jobs ran beside it.
local function count_death(job)
  local max_concurrency = tonumber(redis.call('HGET', job, F_MAX_CONCURRENCY) or '')
  if max_concurrency == 1 then
    local crashes = math.min(tonumber(redis.call('HGET', job, F_CRASHES) or '') or 0, crash_limit) + 1
    redis.call('HSET', job, F_CRASHES, crashes)
    return crashes
  end
  local shared = math.min(max_concurrency or num_held, num_held)
  redis.call('HSET', job, F_MAX_CONCURRENCY, math.max(1, math.floor(shared / 2)))
  return 0
end

for i = #over, 1, -1 do  -- the last is pushed first, so that the order stays
  local found = over[i]
  local list, wip = KEYS[2 * found.index - 1], KEYS[2 * found.index]
  redis.call('ZREM', wip, found.lease_key)
  redis.call('DEL', EXECUTION_ .. found.lease_key, OUTCOME_UPLOAD_ .. found.lease_key)
  local id, job = found.id, JOB_ .. (found.id or '')
  if id and redis.pcall('HEXISTS', job, F_DATA) == 1 then
    try('zset', 'ZREM', EXECUTIONS_ .. id, found.execution)
    local crashes = held_by_dead[found.lease_key] and count_death(job) or 0
    redis.call('HSET', job, F_STATUS, 'queued', F_STARTED_AT, '', F_WORKER_NAME, '', F_ENQUEUED_AT, iso_now)
    if crashes >= crash_limit or redis.call('HGET', job, F_CANCEL_REQUESTED) == '1' then
      local execution = string.format('%s%08x', call_id, #rows)
      rows[#rows + 1] = lease(found.index, id, execution, wip, worker, lease_ms, grace_s)
    else
      redis.call('LPUSH', list, id)
      wake(string.sub(list, #QUEUE_ + 1), 1)
      num_back = num_back + 1
    end
  end
end
return {num_back, rows, wrong_types}
