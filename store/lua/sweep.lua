-- include: writes.lua
--
-- Drop leftovers of expired keys: ids of jobs in the lists of owners and in RQ's registries, and names of workers.
-- Each call checks a bounded number of ids, so it blocks Redis for milliseconds.
--
-- ARGV  seconds until an index is checked again, then the name of each queue
-- Returns whether there is more to drop.
local again_s = tonumber(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
local MAX_INDEXES, MAX_IDS = 20, 200
local has_more = 0

-- Drop ids of expired jobs. The oldest ids are checked, and as many random ones.
local function drop_dead(index)
  local num_dropped = 0
  for _, ids in ipairs({redis.call('ZRANGE', index, 0, MAX_IDS - 1), redis.call('ZRANDMEMBER', index, MAX_IDS)}) do
    for _, id in ipairs(ids) do
      if redis.call('EXISTS', JOB_ .. id) == 0 then num_dropped = num_dropped + redis.call('ZREM', index, id) end
    end
  end
  if num_dropped >= MAX_IDS then has_more = 1 end
  return num_dropped
end

local due = try('zset', 'ZRANGEBYSCORE', INDEXES, '-inf', now, 'LIMIT', 0, MAX_INDEXES) or {}
for _, index in ipairs(due) do
  local num_dropped = is_type(index, 'zset') and drop_dead(index) or 0
  if redis.call('EXISTS', index) == 0 then
    redis.call('ZREM', INDEXES, index)
  else
    redis.call('ZADD', INDEXES, num_dropped >= MAX_IDS and now or now + again_s, index)
  end
end
if #due == MAX_INDEXES then has_more = 1 end

for _, worker in ipairs(try('zset', 'ZRANDMEMBER', MODELS, MAX_IDS) or {}) do
  if redis.call('EXISTS', CARD_ .. worker) == 0 then redis.call('ZREM', MODELS, worker) end
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
  if is_type(CANCELED_ .. ARGV[i], 'zset') then drop_dead(CANCELED_ .. ARGV[i]) end  -- scored by the time of the cancel
end
return has_more
