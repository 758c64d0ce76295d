-- include: wrong_types.lua
--
-- The list of a queue that owners share holds at most as many jobs as one worker has in flight. submit.lua puts all others
-- into the backlogs of their owners, from which they move to the list in order, by weighted round robin of the owners:
--
--   rq:queue:<queue>               list: the next jobs, RQ's `queued`
--   <backlog>:<queue>:<owner>      list: an owner's other jobs, RQ's `deferred`; also in rq:deferred:<queue>
--   <fair share>:<queue>           zset: owners that have a backlog, by their fair-share clock: jobs served / weight

-- Return how many owners have a backlog; nil if the key has a wrong type.
local function num_sharing(list)
  return try('zset', 'ZCARD', FAIR_SHARE_ .. string.sub(list, #QUEUE_ + 1))
end

-- Fill the list up to `length` jobs, or until no owner has a backlog. Ids of jobs that were canceled or deleted in between
-- are dropped.
local function top_up(list, length)
  local queue = string.sub(list, #QUEUE_ + 1)
  local fair_share = FAIR_SHARE_ .. queue
  local missing = length - redis.call('LLEN', list)
  while missing > 0 do
    local owner = redis.call('ZRANGE', fair_share, 0, 0)[1]
    if not owner then return end
    local backlog = BACKLOG_ .. queue .. ':' .. owner
    local id = try('list', 'LINDEX', backlog, 0)
    if not id then
      redis.call('ZREM', fair_share, owner)  -- only now: an owner that submits again before its turn keeps its clock
    else
      local job = JOB_ .. id
      local known = redis.pcall('HMGET', job, F_STATUS, F_WEIGHT)  -- an error if the key is no hash: then there is no job
      redis.call('LPOP', backlog)
      try('zset', 'ZREM', DEFERRED_ .. queue, id)
      if known[1] == 'deferred' then
        redis.call('HSET', job, F_STATUS, 'queued')
        redis.call('RPUSH', list, id)
        local weight = tonumber(known[2] or '')
        redis.call('ZINCRBY', fair_share, weight and weight >= 1 and weight < 1e9 and 1 / weight or 1, owner)  -- any other weight counts as 1
        missing = missing - 1
      end
    end
  end
end
