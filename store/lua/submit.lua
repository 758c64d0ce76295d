-- flags: allow-oom
-- include: clock.lua
-- include: memory.lua
-- include: hand_out.lua
-- include: unserved.lua
-- include: ledger.lua
--
-- Put one or many jobs on their queues: all of them, or none.
--
-- ARGV[1]  owner
-- ARGV[2]  most jobs that may wait in one queue
-- ARGV[3]  most jobs in the list of a queue that owners share; the rest goes to the backlogs of their owners (backlog.lua).
--          0: all go to the list
-- ARGV[4]  most queues of models that nobody serves, of this owner
-- ARGV[5]  the same, of all owners together
-- ARGV[6]  most jobs of this owner, whether they wait or have ended; 0: no limit
-- ARGV[7]  most bytes of this owner, see refuse_bytes
-- then for each job: id, queue, '1': nobody serves its model, fingerprint of the body, the request, the body
--   that is kept with it (empty: none), bytes that the job and its result may take, how many arguments its RQ hash has (name, value, name, value, ...), these
--
-- Returns {'accepted', {status, ...}}: '' for a job that is new, its RQ status for one that was there already;
--      or {'conflict', index}: a job of that id came with another body;
--      or {'full', queue, its depth, the number of new jobs for it};
--      or {'over_quota', 'jobs' or 'bytes', how many the owner has, how many are new, the most, seconds until the first entry
--         of the ledger is checked}: the owner has too much;
--      or {'no_memory'}: too much of Redis's memory is in use for new jobs;
--      or {'unserved', 'own' or 'all', number of the owner's or of all queues}: there are too many such queues;
--      or {'wrong_type', key, expected type}: a queue cannot take jobs.

local owner, max_depth, list_length = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_unserved, max_unserved_of_all = tonumber(ARGV[4]), tonumber(ARGV[5])
local max_jobs, max_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local is_counted = max_jobs > 0 or max_bytes ~= 0
local delivery_bytes = is_counted and DELIVERY_BYTES * (try('hash', 'HLEN', ENDPOINTS_OF_ .. owner) or 0) or 0  -- of a job's end
local owned = JOBS_OF_ .. owner
local MOST_KEPT_S = 30 * 86400  -- of a body, whatever becomes of its job; the end of the job sets the time for which it is kept
local SWEEP_S = 60  -- until the first sweep of a new list of ids (see sweep.lua)

-- Return how many of the owner's jobs wait in a shared queue.
local function num_own(queue)
  local num = redis.call('LLEN', backlog_of(queue, owner))
  for _, id in ipairs(redis.call('LRANGE', QUEUE_ .. queue, 0, list_length - 1)) do
    if redis.pcall('HGET', JOB_ .. id, F_OWNER) == owner then num = num + 1 end
  end
  return num
end

-- Return the reply that refuses more queues that nobody serves, or nil. Some of the owner's, and some that are due, are
-- checked before. Each owner may have a few, however many the others have.
local MIN_UNSERVED, NUM_CHECKS = 10, 8
local function refuse_unserved(queues)
  local num_new, own = 0, UNSERVED_OF_ .. owner
  for queue in pairs(queues) do num_new = num_new + (try('set', 'SISMEMBER', own, queue) == 0 and 1 or 0) end
  if num_new == 0 then return nil end
  check_due(math.floor(now), NUM_CHECKS)
  for _, queue in ipairs(try('set', 'SRANDMEMBER', own, NUM_CHECKS) or {}) do check_unserved(owner, queue, math.floor(now)) end
  local num_own, num_all = try('set', 'SCARD', own) or 0, try('zset', 'ZCARD', UNSERVED) or 0
  if num_own + num_new > max_unserved then return {'unserved', 'own', num_own} end
  if num_all + num_new > max_unserved_of_all and num_own + num_new > MIN_UNSERVED then return {'unserved', 'all', num_all} end
end

-- Return the reply that refuses jobs for which Redis or the owner has no room, or nil.
local function refuse_jobs(num_new, new_bytes)
  local is_full, limit = exceeds_memory(MEMORY_FOR_NEW)
  if is_full then return {'no_memory'} end
  if not is_counted then return nil end
  check_entries(owner, math.floor(now), 100 + 2 * num_new)
  local num_jobs = try('zset', 'ZCARD', owned) or 0
  if max_jobs > 0 and num_jobs + num_new > max_jobs then return {'over_quota', 'jobs', num_jobs, num_new, max_jobs, 0} end
  return refuse_bytes(owner, new_bytes, max_bytes, limit, math.floor(now))
end

-- Check everything before the first job is written.
local FIRST = 8
local NUM_FIXED = 8
local starts, statuses, new_in, unserved = {}, {}, {}, {}
local num_new, new_bytes = 0, 0
local i = FIRST
while i <= #ARGV do
  local id, queue, is_unserved, fingerprint = unpack(ARGV, i, i + 3)
  starts[#starts + 1] = i
  i = i + NUM_FIXED + tonumber(ARGV[i + NUM_FIXED - 1])
  local known = redis.call('HMGET', JOB_ .. id, F_FINGERPRINT, F_STATUS)
  if not known[1] then
    statuses[#statuses + 1] = ''
    new_in[queue] = (new_in[queue] or 0) + 1
    num_new, new_bytes = num_new + 1, new_bytes + ARGV[starts[#starts] + 6] + delivery_bytes
    if is_unserved == '1' then unserved[queue] = true end
  elseif known[1] == fingerprint then
    statuses[#statuses + 1] = known[2]
  else
    return {'conflict', #statuses}
  end
end
local refusal = num_new > 0 and refuse_jobs(num_new, new_bytes)
if refusal then return refusal end
for queue, count in pairs(new_in) do
  local num_listed, num_deferred = try('list', 'LLEN', QUEUE_ .. queue), try('zset', 'ZCARD', DEFERRED_ .. queue)
  local num_sharing = try('zset', 'ZCARD', FAIR_SHARE_ .. queue)
  local is_shared = list_length > 0 or num_sharing ~= 0
  local is_usable = num_listed and num_deferred and num_sharing and (not is_shared or is_type(backlog_of(queue, owner), 'list'))
  if not is_usable then return {'wrong_type', wrong_types[1][1], wrong_types[1][2]} end
  local depth = num_listed + num_deferred
  -- A queue that other owners have filled still accepts as many jobs from each owner as the list holds.
  if depth + count > max_depth
    and (list_length == 0 or num_own(queue) + count > math.min(list_length, max_depth)) then
    return {'full', queue, depth, count}
  end
end

if next(unserved) then
  refusal = refuse_unserved(unserved)
  if refusal then return refusal end
end

-- The time of submission, in whole microseconds. The cursor of a page is such a time, so no two jobs of an owner have the
-- same. It is Redis's clock, because those of the API processes differ.
local created = tonumber(time[1]) * 1e6 + tonumber(time[2])
local last = try('zset', 'ZREVRANGE', owned, 0, 0, 'WITHSCORES')
local newest = tonumber(last and last[2] or 0)
if newest < 1e11 then  -- a greater score is no time of ours
  created = math.max(created, math.floor(newest * 1e6 + 0.5) + 1)
end

for job, at in ipairs(starts) do
  if statuses[job] == '' then
    local id, queue, _, fingerprint, body, kept, num_bytes, num_fields = unpack(ARGV, at, at + NUM_FIXED - 1)
    local created_at = string.format('%d.%06d', math.floor(created / 1e6), created % 1e6)
    local iso = iso_time(created / 1e6)
    redis.call('HSET', JOB_ .. id, F_FINGERPRINT, fingerprint, F_CREATED, created_at, F_CREATED_AT, iso,
      F_ENQUEUED_AT, iso, unpack(ARGV, at + NUM_FIXED, at + NUM_FIXED - 1 + num_fields))
    redis.call('SET', REQUEST_ .. id, body)
    if kept ~= '' then redis.call('SET', RESPONSE_ .. id, kept, 'EX', MOST_KEPT_S) end
    try('zset', 'ZADD', owned, created_at, id)
    if goes_to_backlog(queue, list_length) then
      put_in_backlog(queue, owner, id, created_at)
    else
      redis.call('RPUSH', QUEUE_ .. queue, id)
    end
    if is_counted then write_size(owner, id, num_bytes + delivery_bytes, later(now)) end
    created = created + 1
  end
end
if num_new == 0 and starts[1] then
  -- Write something: the caller's WAIT covers what was written before the last write of its own connection.
  redis.call('HSET', JOB_ .. ARGV[FIRST], F_FINGERPRINT, ARGV[FIRST + 3])
end
for queue in pairs(unserved) do add_unserved(owner, queue, math.floor(now)) end
for queue, count in pairs(new_in) do
  try('set', 'SADD', QUEUES, QUEUE_ .. queue)
  hand_out(queue, count)
end

-- A job expires by itself, but its id in the owner's list does not. Each new job checks two ids at random, which keeps
-- the ids of expired jobs below half of the list. sweep.lua drops the rest.
if num_new > 0 then
  try('zset', 'ZADD', SWEEP_SCHEDULE, 'NX', tonumber(time[1]) + SWEEP_S, owned)
  for _, id in ipairs(try('zset', 'ZRANDMEMBER', owned, math.min(2 * num_new, 200)) or {}) do
    if redis.call('EXISTS', JOB_ .. id) == 0 then
      redis.call('ZREM', owned, id)
    end
  end
end

return {'accepted', statuses}
