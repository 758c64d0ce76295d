-- include: wrong_types.lua
--
-- The queues of models that nobody serves. Whoever has an API key can make up models to wait for, so their queues are listed
-- by owner and bounded in number, and what a queue leaves in Redis is removed when nothing of it is left but its name:
--
--   <unserved>              zset: <owner>:<queue>, by the time (unix, s) of the next check
--   <unserved>:<owner>      set: the queues of one owner
--
-- A check is due once a minute. The submissions of an owner and the sweeps of all workers run those that are due.

local CHECK_S = 60
local MAX_CANCELED = 10  -- a submission may check several queues

-- Drop ids of expired jobs from a list. The oldest ids are checked, and as many random ones. Return how many were dropped.
local function drop_expired(list, max_ids)
  local num_dropped = 0
  for _, ids in ipairs({redis.call('ZRANGE', list, 0, max_ids - 1), redis.call('ZRANDMEMBER', list, max_ids)}) do
    for _, id in ipairs(ids) do
      if redis.call('EXISTS', JOB_ .. id) == 0 then num_dropped = num_dropped + redis.call('ZREM', list, id) end
    end
  end
  return num_dropped
end

-- True if the key of a queue belongs to this deployment, see Keys.
local function is_own_queue(key)
  return string.sub(key, 1, #OWN_QUEUE_) == OWN_QUEUE_ and (OWN_QUEUE_ ~= QUEUE_ or not string.find(key, '::', 1, true))
end

-- True if RQ knows a worker of the queue.
local function is_served(queue)
  return (try('set', 'SCARD', WORKERS_OF_ .. queue) or 0) > 0
end

-- Remove what a queue leaves behind, if it has no worker and no job in any state. Return whether it was removed.
local function remove_if_unused(queue, now)
  if is_served(queue) or try('list', 'LLEN', QUEUE_ .. queue) ~= 0 then return false end
  for _, registry in ipairs({FINISHED_, FAILED_}) do  -- scored by the time of expiry
    try('zset', 'ZREMRANGEBYSCORE', registry .. queue, '(0', now)
  end
  if is_type(CANCELED_ .. queue, 'zset') then drop_expired(CANCELED_ .. queue, MAX_CANCELED) end
  for _, prefix in ipairs({FINISHED_, FAILED_, CANCELED_, DEFERRED_, SCHEDULED_, WIP_}) do
    if try('zset', 'ZCARD', prefix .. queue) ~= 0 then return false end
  end
  -- Owners keep their clocks until their turn, also those whose whole backlog was canceled.
  local owners = try('zset', 'ZRANGE', FAIR_SHARE_ .. queue, 0, -1)
  if not owners then return false end
  for _, owner in ipairs(owners) do
    if redis.call('EXISTS', BACKLOG_ .. queue .. ':' .. owner) == 1 then return false end
  end
  try('set', 'SREM', QUEUES, QUEUE_ .. queue)
  redis.call('DEL', SPEEDS_ .. queue, WAITING_WORKERS_ .. queue, SERVED_ .. queue, FAIR_SHARE_ .. queue)
  return true
end

local function add_unserved(owner, queue, now)
  if try('set', 'SADD', UNSERVED_OF_ .. owner, queue) then
    try('zset', 'ZADD', UNSERVED, 'NX', now + CHECK_S, owner .. ':' .. queue)
  end
end

-- Take a queue off its owner's list if a worker serves it by now, or if nothing of it is left.
local function check_unserved(owner, queue, now)
  local entry = owner .. ':' .. queue
  if is_served(queue) or remove_if_unused(queue, now) then
    try('zset', 'ZREM', UNSERVED, entry)
    try('set', 'SREM', UNSERVED_OF_ .. owner, queue)
  else
    try('zset', 'ZADD', UNSERVED, 'XX', now + CHECK_S, entry)
  end
end

-- Run checks that are due. Return how many there were.
local function check_due(now, max_checks)
  local due = try('zset', 'ZRANGEBYSCORE', UNSERVED, '-inf', now, 'LIMIT', 0, max_checks) or {}
  for _, entry in ipairs(due) do
    local owner, queue = string.match(entry, '^([^:]*):(.*)$')
    if owner then check_unserved(owner, queue, now) else redis.call('ZREM', UNSERVED, entry) end
  end
  return #due
end
