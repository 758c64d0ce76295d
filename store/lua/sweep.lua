-- flags: allow-oom
-- include: unserved.lua
-- include: ledger.lua
--
-- Drop what expired keys leave behind: ids of jobs and deliveries in the lists of owners and in RQ's registries, names of
-- workers and models, queues without jobs, and entries of ledgers. Each call checks a bounded number of ids, so it blocks Redis for milliseconds.
--
-- ARGV  seconds until a list of ids is checked again, then the name of each queue
-- Returns whether there is more to drop.
local again_s = tonumber(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
local MAX_LISTS, MAX_IDS, MAX_QUEUES = 20, 200, 50
local has_more = 0

local due = try('zset', 'ZRANGEBYSCORE', SWEEP_SCHEDULE, '-inf', now, 'LIMIT', 0, MAX_LISTS) or {}
for _, list in ipairs(due) do
  local num_dropped = is_type(list, 'zset') and drop_expired(list, MAX_IDS) or 0
  local owner = string.sub(list, 1, #JOBS_OF_) == JOBS_OF_ and string.sub(list, #JOBS_OF_ + 1)
  local is_unfinished = num_dropped >= MAX_IDS or (owner and check_entries(owner, now, MAX_IDS) == MAX_IDS)
  if is_unfinished then has_more = 1 end
  if redis.call('EXISTS', list) == 0 and not (owner and redis.call('EXISTS', LEDGER_OF_ .. owner) == 1) then
    redis.call('ZREM', SWEEP_SCHEDULE, list)
  else
    redis.call('ZADD', SWEEP_SCHEDULE, is_unfinished and now or now + again_s, list)
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
  local canceled = CANCELED_ .. ARGV[i]  -- scored by the time of the cancel
  if is_type(canceled, 'zset') and drop_expired(canceled, MAX_IDS) >= MAX_IDS then has_more = 1 end
end

-- The queues of a deployment that listed none by owner are found at random, as Redis finds expired keys: while many of those
-- found are unused, there are more.
if check_due(now, MAX_QUEUES) == MAX_QUEUES then has_more = 1 end
local num_removed = 0
for _, key in ipairs(try('set', 'SRANDMEMBER', QUEUES, MAX_QUEUES) or {}) do
  if is_own_queue(key) and remove_if_unused(string.sub(key, #QUEUE_ + 1), now) then num_removed = num_removed + 1 end
end
if num_removed > MAX_QUEUES / 4 then has_more = 1 end
return has_more
