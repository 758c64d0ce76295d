-- flags: allow-oom
-- include: clock.lua
-- include: memory.lua
-- include: hand_out.lua
--
-- Put one or many jobs on their queues: all of them, or none.
--
-- ARGV[1]  owner
-- ARGV[2]  most jobs that may wait in one queue
-- ARGV[3]  most jobs in the list of a queue that owners share; the rest goes to the backlogs of their owners (backlog.lua).
--          0: all go to the list
-- then for each job: id, queue, fingerprint of the body, the request, how many arguments its RQ hash has
--   (name, value, name, value, ...), these
--
-- Returns {'accepted', {status, ...}}: '' for a job that is new, its RQ status for one that was there already;
--      or {'conflict', index}: a job of that id came with another body;
--      or {'full', queue, its depth, the number of new jobs for it};
--      or {'no_memory'}: too much of Redis's memory is in use for new jobs;
--      or {'wrong_type', key, expected type}: a queue cannot take jobs.

local owner, max_depth, list_length = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local owned = JOBS_OF_ .. owner
local SWEEP_S = 60  -- until the first sweep of a new list of ids (see sweep.lua)

local function backlog_of(queue)
  return BACKLOG_ .. queue .. ':' .. owner
end

-- True if a new job of the queue goes to a backlog: the list is full, or other jobs are in a backlog already.
local function goes_to_backlog(queue)
  return redis.call('EXISTS', FAIR_SHARE_ .. queue) == 1
    or (list_length > 0 and redis.call('LLEN', QUEUE_ .. queue) >= list_length)
end

-- Return how many of the owner's jobs wait in a shared queue.
local function num_own(queue)
  local num = redis.call('LLEN', backlog_of(queue))
  for _, id in ipairs(redis.call('LRANGE', QUEUE_ .. queue, 0, list_length - 1)) do
    if redis.pcall('HGET', JOB_ .. id, F_OWNER) == owner then num = num + 1 end
  end
  return num
end

-- Put a job into the backlog of its owner. The fair-share clock of an owner that had no backlog starts at that of the owner
-- whose turn is next.
local function put_in_backlog(queue, id, created_at)
  local fair_share = FAIR_SHARE_ .. queue
  redis.call('ZADD', fair_share, 'NX', redis.call('ZRANGE', fair_share, 0, 0, 'WITHSCORES')[2] or 0, owner)
  redis.call('RPUSH', backlog_of(queue), id)
  redis.call('ZADD', DEFERRED_ .. queue, created_at, id)
  redis.call('HSET', JOB_ .. id, F_STATUS, 'deferred')
end

-- Check everything before the first write.
local FIRST = 4
local NUM_FIXED = 5
local starts, statuses, new_in = {}, {}, {}
local i = FIRST
while i <= #ARGV do
  local id, queue, fingerprint = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  starts[#starts + 1] = i
  i = i + NUM_FIXED + tonumber(ARGV[i + NUM_FIXED - 1])
  local known = redis.call('HMGET', JOB_ .. id, F_FINGERPRINT, F_STATUS)
  if not known[1] then
    statuses[#statuses + 1] = ''
    new_in[queue] = (new_in[queue] or 0) + 1
  elseif known[1] == fingerprint then
    statuses[#statuses + 1] = known[2]
  else
    return {'conflict', #statuses}
  end
end
if next(new_in) and exceeds_memory(MEMORY_FOR_NEW) then return {'no_memory'} end
for queue, count in pairs(new_in) do
  local num_listed, num_deferred = try('list', 'LLEN', QUEUE_ .. queue), try('zset', 'ZCARD', DEFERRED_ .. queue)
  local num_sharing = try('zset', 'ZCARD', FAIR_SHARE_ .. queue)
  local is_shared = list_length > 0 or num_sharing ~= 0
  local is_usable = num_listed and num_deferred and num_sharing and (not is_shared or is_type(backlog_of(queue), 'list'))
  if not is_usable then return {'wrong_type', wrong_types[1][1], wrong_types[1][2]} end
  local depth = num_listed + num_deferred
  -- A queue that other owners have filled still accepts as many jobs from each owner as the list holds.
  if depth + count > max_depth
    and (list_length == 0 or num_own(queue) + count > math.min(list_length, max_depth)) then
    return {'full', queue, depth, count}
  end
end

-- The time of submission, in whole microseconds. The cursor of a page is such a time, so no two jobs of an owner have the
-- same. It is Redis's clock, because those of the API processes differ.
local created = tonumber(time[1]) * 1e6 + tonumber(time[2])
local last = try('zset', 'ZREVRANGE', owned, 0, 0, 'WITHSCORES')
local newest = tonumber(last and last[2] or 0)
if newest < 1e11 then  -- a greater score is no time of ours
  created = math.max(created, math.floor(newest * 1e6 + 0.5) + 1)
end

local num_new = 0
for job, at in ipairs(starts) do
  if statuses[job] == '' then
    local id, queue, fingerprint, body, num_fields = unpack(ARGV, at, at + NUM_FIXED - 1)
    local created_at = string.format('%d.%06d', math.floor(created / 1e6), created % 1e6)
    local iso = iso_time(created / 1e6)
    redis.call('HSET', JOB_ .. id, F_FINGERPRINT, fingerprint, F_CREATED, created_at, F_CREATED_AT, iso,
      F_ENQUEUED_AT, iso, unpack(ARGV, at + NUM_FIXED, at + NUM_FIXED - 1 + num_fields))
    redis.call('SET', REQUEST_ .. id, body)
    try('zset', 'ZADD', owned, created_at, id)
    if goes_to_backlog(queue) then
      put_in_backlog(queue, id, created_at)
    else
      redis.call('RPUSH', QUEUE_ .. queue, id)
    end
    num_new = num_new + 1
    created = created + 1
  end
end
if num_new == 0 and starts[1] then
  -- Write something: the caller's WAIT covers what was written before the last write of its own connection.
  redis.call('HSET', JOB_ .. ARGV[FIRST], F_FINGERPRINT, ARGV[FIRST + 2])
end
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
