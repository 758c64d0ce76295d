-- flags: allow-oom
-- include: end_job.lua
--
-- `rq empty`: jobs of the API that wait in a queue, also behind RQ's list (see backlog.lua), end as canceled; others are
-- deleted, as RQ does.
--
-- ARGV  queue, the outcome (wire.Failure), seconds for which it is kept if the job does not say
-- Returns how many jobs there were.
local queue, outcome, default_ttl_s = unpack(ARGV)
local fair_share = FAIR_SHARE_ .. queue

local lists = {QUEUE_ .. queue}
for _, owner in ipairs(try('zset', 'ZRANGE', fair_share, 0, -1) or {}) do
  lists[#lists + 1] = BACKLOG_ .. queue .. ':' .. owner
end

local num = 0
for _, list in ipairs(lists) do
  for _, id in ipairs(try('list', 'LRANGE', list, 0, -1) or {}) do
    local job = JOB_ .. id
    local known = redis.pcall('HMGET', job, F_STATUS, F_KIND, F_FAILURE_TTL)
    try('zset', 'ZREM', DEFERRED_ .. queue, id)
    if known[2] and (known[1] == 'queued' or known[1] == 'deferred') then
      end_waiting_job(id, queue, 'canceled', outcome, failure_ttl_s(known[3], default_ttl_s))
      num = num + 1
    elseif known[1] == 'queued' then
      redis.call('DEL', job, job .. _DEPENDENTS)
      num = num + 1
    end
  end
  redis.call('DEL', list)
end
redis.call('DEL', fair_share)
return num
