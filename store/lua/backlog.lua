-- include: wrong_types.lua
--
-- The list of a queue that owners share holds at most as many jobs as one worker has in flight. submit.lua puts all others
-- into the backlogs of their owners, and so does enqueue_due.lua with jobs that were postponed. From there they move to the
-- list in order, by weighted round robin of the owners:
--
--   rq:queue:<queue>               list: the next jobs, RQ's `queued`
--   <backlog>:<queue>:<owner>      list: an owner's other jobs, RQ's `deferred`; also in rq:deferred:<queue>
--   <fair share>:<queue>           zset: owners that have a backlog, by their fair-share clock: jobs served / weight

local function backlog_of(queue, owner)
  return BACKLOG_ .. queue .. ':' .. owner
end

-- True if a new job of the queue goes to a backlog: the list is full, or other jobs are in a backlog already. 0: none does.
local function goes_to_backlog(queue, list_length)
  return redis.call('EXISTS', FAIR_SHARE_ .. queue) == 1
    or (list_length > 0 and redis.call('LLEN', QUEUE_ .. queue) >= list_length)
end

-- Put a job into the backlog of its owner. The fair-share clock of an owner that had no backlog starts at that of the owner
-- whose turn is next.
local function put_in_backlog(queue, owner, id, created_at)
  local fair_share = FAIR_SHARE_ .. queue
  redis.call('ZADD', fair_share, 'NX', redis.call('ZRANGE', fair_share, 0, 0, 'WITHSCORES')[2] or 0, owner)
  redis.call('RPUSH', backlog_of(queue, owner), id)
  redis.call('ZADD', DEFERRED_ .. queue, created_at, id)
  redis.call('HSET', JOB_ .. id, F_STATUS, 'deferred')
end

-- Put a job that exists into the backlog of its owner, if a new job of the queue would go to one. Return whether it did. A key
-- of a wrong type keeps the job out, because one that is in no list never runs.
local function join_backlog(queue, owner, id, at)
  local joins = is_type(QUEUE_ .. queue, 'list') and is_type(FAIR_SHARE_ .. queue, 'zset') and is_type(DEFERRED_ .. queue, 'zset')
    and is_type(backlog_of(queue, owner), 'list') and goes_to_backlog(queue, LIST_LENGTH)
  if joins then put_in_backlog(queue, owner, id, at) end
  return joins
end

-- Return how many owners have a backlog; nil if the key has a wrong type.
local function num_sharing(list)
  return try('zset', 'ZCARD', FAIR_SHARE_ .. string.sub(list, #QUEUE_ + 1))
end

-- Return how far one job moves the clock of its owner. `text` is the job's weight; any that is out of range counts as 1.
local function turn_of(text)
  local weight = tonumber(text or '')
  return weight and weight >= 1 and weight < 1e9 and 1 / weight or 1
end

-- Take the next job out of an owner's backlog, and move the owner's clock. Return its id and its turn; nil if no job is left.
-- Ids of jobs that were canceled or deleted are dropped.
local function pop_backlog(queue, owner)
  local backlog = backlog_of(queue, owner)
  while true do
    local id = try('list', 'LPOP', backlog)
    if not id then
      redis.call('ZREM', FAIR_SHARE_ .. queue, owner)  -- only now: an owner that submits again before its turn keeps its clock
      return nil
    end
    local known = redis.pcall('HMGET', JOB_ .. id, F_STATUS, F_WEIGHT)  -- an error if the key is no hash: then there is no job
    try('zset', 'ZREM', DEFERRED_ .. queue, id)
    if known[1] == 'deferred' then
      local turn = turn_of(known[2])
      redis.call('ZINCRBY', FAIR_SHARE_ .. queue, turn, owner)
      return id, turn
    end
  end
end

-- Fill the list up to `length` jobs, or until no owner has a backlog.
local function top_up(list, length)
  local queue = string.sub(list, #QUEUE_ + 1)
  local missing = length - redis.call('LLEN', list)
  while missing > 0 do
    local owner = redis.call('ZRANGE', FAIR_SHARE_ .. queue, 0, 0)[1]
    if not owner then return end
    local id = pop_backlog(queue, owner)
    if id then
      redis.call('HSET', JOB_ .. id, F_STATUS, 'queued')
      redis.call('RPUSH', list, id)
      missing = missing - 1
    end
  end
end
