-- `rq empty`: jobs of the API that wait in a queue, also behind RQ's list (see backlog.lua), end as canceled; others are
-- deleted, as RQ does. Put wire.OUTBOX and record_outcome.lua before it.
--
-- KEYS  rq:queue:<queue>
-- ARGV  the outcome (wire.Failure), now (ISO), seconds that it is kept where the job does not say
-- Returns how many jobs there were.
local queue, outcome, iso, default_ttl_s = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local name = string.sub(queue, #'rq:queue:' + 1)
local turns = 'scorepool:turns:' .. name
local now = redis.call('TIME')[1]

local lists = {queue}
for _, owner in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
  lists[#lists + 1] = 'scorepool:backlog:' .. name .. ':' .. owner
end

local function cancel(id, job, ttl_s)
  redis.call('HSET', job, 'status', 'canceled', 'ended_at', iso)
  redis.call('EXPIRE', job, ttl_s)
  redis.call('ZADD', 'rq:canceled:' .. name, now, id)
  redis.call('DEL', 'scorepool:outcome:' .. id)  -- of an earlier run
  record_outcome(id, outcome, ttl_s, false, iso)
end

local num = 0
for _, list in ipairs(lists) do
  for _, id in ipairs(redis.call('LRANGE', list, 0, -1)) do
    local job = 'rq:job:' .. id
    local known = redis.pcall('HMGET', job, 'status', 'kind', 'failure_ttl')
    redis.call('ZREM', 'rq:deferred:' .. name, id)
    if known[2] and (known[1] == 'queued' or known[1] == 'deferred') then
      local ttl_s = tonumber(known[3] or '')
      cancel(id, job, ttl_s and ttl_s >= 1 and ttl_s < 1e9 and math.floor(ttl_s) or default_ttl_s)
      num = num + 1
    elseif known[1] == 'queued' then
      redis.call('DEL', job, job .. ':dependents')
      num = num + 1
    end
  end
  redis.call('DEL', list)
end
redis.call('DEL', turns)
return num
