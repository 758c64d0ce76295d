-- End jobs that succeeded and that no other job waits for, many in one step. It leaves what RQ's own methods leave, which
-- end all other jobs (worker/rq/commit.py), at a tenth of their cost. Put wire.OUTBOX and record_outcome.lua before it.
--
-- KEYS  rq:wip:<queue> of each job
-- ARGV  see worker/rq/success_writer.py
-- Returns of each job: 'recorded'; 'lost', its lease is not ours any more; or 'awaited', another job depends on it, and
-- nothing was written.
local worker, iso, state, current_job = unpack(ARGV)
local now = tonumber(redis.call('TIME')[1])
local at = 5

-- The next `count` arguments; without one, the count comes before them.
local function take(count)
  if not count then
    count, at = tonumber(ARGV[at]), at + 1
  end
  at = at + count
  return unpack(ARGV, at - count, at - 1)
end

local function finish(wip, member, outcome, ttl_s, fields, result)
  local id = string.match(member, '^(.*):')
  local job = 'rq:job:' .. id
  if not redis.call('ZSCORE', wip, member) or redis.pcall('HEXISTS', job, 'data') ~= 1 then return 'lost' end
  if redis.call('EXISTS', job .. ':dependents') == 1 then return 'awaited' end

  redis.call('HSET', job, 'status', 'finished', unpack(fields))
  redis.call('XADD', 'rq:results:' .. id, 'MAXLEN', '~', 10, '*', unpack(result))
  redis.call('EXPIRE', 'rq:results:' .. id, ttl_s)
  redis.call('ZADD', 'rq:finished:' .. string.sub(wip, #'rq:wip:' + 1), now + ttl_s, id)
  redis.call('EXPIRE', job, ttl_s)
  if outcome == '' then
    redis.call('HDEL', job, 'crashes', 'company')
  else
    record_outcome(id, outcome, ttl_s, false, iso)
  end
  redis.call('DEL', 'rq:execution:' .. member, 'rq:executions:' .. id)
  redis.call('ZREM', wip, member)  -- last, because what an error cuts short must keep its lease
  return 'recorded'
end

local answers, num_recorded, worked_s = {}, 0, 0
for i, wip in ipairs(KEYS) do
  local member, outcome, ttl_s, ran_s = take(4)
  local fields, result = {take()}, {take()}
  answers[i] = finish(wip, member, outcome, tonumber(ttl_s), fields, result)
  if answers[i] == 'recorded' then
    num_recorded, worked_s = num_recorded + 1, worked_s + ran_s
  end
end

redis.call('HINCRBY', worker, 'successful_job_count', num_recorded)
redis.call('HINCRBYFLOAT', worker, 'total_working_time', string.format('%.6f', worked_s))
redis.call('HSET', worker, unpack(current_job == '' and {'state', state} or {'current_job', current_job}))
if current_job == '' then redis.call('HDEL', worker, 'current_job') end
return answers
