-- flags: allow-oom
-- include: wrong_types.lua
--
-- Drop what expired keys leave behind: ids of jobs and deliveries in the lists of owners and in RQ's registries, and names of
-- workers and models. Each call checks a bounded number of ids, so it blocks Redis for milliseconds.
--
-- ARGV  seconds until a list of ids is checked again, then the name of each queue
-- Returns whether there is more to drop.
local again_s = tonumber(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
local MAX_LISTS, MAX_IDS = 20, 200
local has_more = 0

-- Drop ids of expired jobs from a list. The oldest ids are checked, and as many random ones. Return how many were dropped.
local function drop_expired(list)
  local num_dropped = 0
  for _, ids in ipairs({redis.call('ZRANGE', list, 0, MAX_IDS - 1), redis.call('ZRANDMEMBER', list, MAX_IDS)}) do
    for _, id in ipairs(ids) do
      if redis.call('EXISTS', JOB_ .. id) == 0 then num_dropped = num_dropped + redis.call('ZREM', list, id) end
    end
  end
  if num_dropped >= MAX_IDS then has_more = 1 end
  return num_dropped
end

local due = try('zset', 'ZRANGEBYSCORE', SWEEP_SCHEDULE, '-inf', now, 'LIMIT', 0, MAX_LISTS) or {}
for _, list in ipairs(due) do
  local num_dropped = is_type(list, 'zset') and drop_expired(list) or 0
  if redis.call('EXISTS', list) == 0 then
    redis.call('ZREM', SWEEP_SCHEDULE, list)
  else
    redis.call('ZADD', SWEEP_SCHEDULE, num_dropped >= MAX_IDS and now or now + again_s, list)
  end
end
if #due == MAX_LISTS then has_more = 1 end

for _, worker in ipairs(try('zset', 'ZRANDMEMBER', MODELS, MAX_IDS) or {}) do
  if redis.call('EXISTS', SERVED_MODEL_ .. worker) == 0 then redis.call('ZREM', MODELS, worker) end
end
for _, model in ipairs(try('zset', 'ZRANDMEMBER', RECENT_MODELS, MAX_IDS) or {}) do
  if redis.call('EXISTS', RECENT_MODEL_ .. model) == 0 then redis.call('ZREM', RECENT_MODELS, model) end
end

for i = 2, #ARGV do
  for _, registry in ipairs({FINISHED_ .. ARGV[i], FAILED_ .. ARGV[i]}) do  -- scored by the time of expiry
    try('zset', 'ZREMRANGEBYSCORE', registry, '-inf', now)
  end
  for _, worker in ipairs(try('set', 'SRANDMEMBER', WORKERS_OF_ .. ARGV[i], MAX_IDS) or {}) do
    if redis.call('EXISTS', worker) == 0 then
      redis.call('SREM', WORKERS_OF_ .. ARGV[i], worker)
      try('set', 'SREM', WORKERS, worker)
    end
  end
  if is_type(CANCELED_ .. ARGV[i], 'zset') then drop_expired(CANCELED_ .. ARGV[i]) end  -- scored by the time of the cancel
end
return has_more
