-- Put one or many jobs on their queues: all of them, or none.
--
-- KEYS[1]  zset: the owner's jobs by time of submission
-- ARGV[1]  most jobs that may wait in one queue
-- ARGV[2]  prefix of the bells
-- ARGV[3]  owner
-- ARGV[4]  most jobs in RQ's list of a queue that owners share; the rest goes behind it (store/lua/backlog.lua).
--          0: all go onto the list
-- then for each job: id, queue, fingerprint of the body, key of the request, the request,
--   how many arguments its RQ hash has (name, value, name, value, ...), these
--
-- Returns {'accepted', {status, ...}}: '' for a job that is new, its RQ status for one that was there already;
--      or {'conflict', index}: a job of that id came with another body;
--      or {'full', queue, its depth, the number of new jobs for it}.

local owned, max_depth, bell, owner, batch = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

local function backlog_of(queue)
  return 'scorepool:backlog:' .. queue .. ':' .. owner
end

-- Behind the list, once anything is there: what came first goes first.
local function is_behind(queue)
  return redis.call('EXISTS', 'scorepool:turns:' .. queue) == 1
    or (batch > 0 and redis.call('LLEN', 'rq:queue:' .. queue) >= batch)
end

-- The owner's jobs that wait in a shared queue.
local function num_own(queue)
  local num = redis.call('LLEN', backlog_of(queue))
  for _, id in ipairs(redis.call('LRANGE', 'rq:queue:' .. queue, 0, batch - 1)) do
    if redis.call('HGET', 'rq:job:' .. id, 'owner') == owner then num = num + 1 end
  end
  return num
end

-- An owner that has no turn yet begins level with the one who is next.
local function put_behind(queue, id, stamp)
  local turns = 'scorepool:turns:' .. queue
  redis.call('ZADD', turns, 'NX', redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2] or 0, owner)
  redis.call('RPUSH', backlog_of(queue), id)
  redis.call('ZADD', 'rq:deferred:' .. queue, stamp, id)
  redis.call('HSET', 'rq:job:' .. id, 'status', 'deferred')
end

-- Look before writing anything.
local FIRST = 5
local starts, statuses, new_in = {}, {}, {}
local i = FIRST
while i <= #ARGV do
  local id, queue, fingerprint = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  starts[#starts + 1] = i
  i = i + 6 + tonumber(ARGV[i + 5])
  local known = redis.call('HMGET', 'rq:job:' .. id, 'fingerprint', 'status')
  if not known[1] then
    statuses[#statuses + 1] = ''
    new_in[queue] = (new_in[queue] or 0) + 1
  elseif known[1] == fingerprint then
    statuses[#statuses + 1] = known[2]
  else
    return {'conflict', #statuses}
  end
end
-- A queue that others have filled still takes a batch from each owner.
for queue, count in pairs(new_in) do
  local depth = redis.call('LLEN', 'rq:queue:' .. queue) + redis.call('ZCARD', 'rq:deferred:' .. queue)
  if depth + count > max_depth and (batch == 0 or num_own(queue) + count > math.min(batch, max_depth)) then
    return {'full', queue, depth, count}
  end
end

-- An owner's jobs are listed by this time, so no two of them may have the same. Redis's clock, which all API processes
-- share, counted in whole microseconds.
local time = redis.call('TIME')
local created = tonumber(time[1]) * 1e6 + tonumber(time[2])
local newest = tonumber(redis.call('ZREVRANGE', owned, 0, 0, 'WITHSCORES')[2] or 0)
if newest < 1e11 then  -- else it is no time, and nobody of ours wrote it
  created = math.max(created, math.floor(newest * 1e6 + 0.5) + 1)
end

local num_new = 0
for job, at in ipairs(starts) do
  if statuses[job] == '' then
    local id, queue, fingerprint, request, body, num_fields = unpack(ARGV, at, at + 5)
    local stamp = string.format('%d.%06d', math.floor(created / 1e6), created % 1e6)
    redis.call('HSET', 'rq:job:' .. id, 'fingerprint', fingerprint, 'created', stamp, unpack(ARGV, at + 6, at + 5 + num_fields))
    redis.call('SET', request, body)
    redis.call('ZADD', owned, stamp, id)
    if is_behind(queue) then
      put_behind(queue, id, stamp)
    else
      redis.call('RPUSH', 'rq:queue:' .. queue, id)
    end
    num_new = num_new + 1
    created = created + 1
  end
end
if num_new == 0 and starts[1] then
  -- Something must be written, for a WAIT after it to wait also for what was written before.
  redis.call('HSET', 'rq:job:' .. ARGV[FIRST], 'fingerprint', ARGV[FIRST + 2])
end
for queue, count in pairs(new_in) do
  redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
  redis.call('PUBLISH', bell .. queue, count)
end

-- Jobs expire by themselves but their ids in the list do not: each new job looks at two ids chosen at random, which
-- keeps the dead below about half of the list at no cost that grows with it.
if num_new > 0 then
  for _, id in ipairs(redis.call('ZRANDMEMBER', owned, math.min(2 * num_new, 200))) do
    if redis.call('EXISTS', 'rq:job:' .. id) == 0 then
      redis.call('ZREM', owned, id)
    end
  end
end

return {'accepted', statuses}
