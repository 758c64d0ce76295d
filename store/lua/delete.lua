-- Remove every trace of a job that has ended, and of its deliveries, whatever state they are in.
--
-- KEYS     the owner's jobs, the job's request, its outcome, the owner's deliveries
-- ARGV     id, owner
--
-- Returns {'absent'} | {'deleted'} | {'alive', RQ status}

local id, owner = ARGV[1], ARGV[2]
local known = redis.call('HMGET', 'rq:job:' .. id, 'owner', 'status', 'deliveries')
if known[1] ~= owner then
  return {'absent'}
end
if known[2] == 'queued' or known[2] == 'started' or known[2] == 'deferred' or known[2] == 'scheduled' then
  return {'alive', known[2]}
end

-- As rq.job.Job.delete does; a worker that still holds the delivery finds its lease gone and records nothing.
local function forget(job)
  local key = 'rq:job:' .. job
  local queue = redis.call('HGET', key, 'origin')
  if not queue then
    return
  end
  redis.call('LREM', 'rq:queue:' .. queue, 0, job)
  for _, registry in ipairs({'finished', 'failed', 'canceled', 'deferred', 'scheduled'}) do
    redis.call('ZREM', 'rq:' .. registry .. ':' .. queue, job)
  end
  for _, execution in ipairs(redis.call('ZRANGE', 'rq:executions:' .. job, 0, -1)) do
    redis.call('ZREM', 'rq:wip:' .. queue, job .. ':' .. execution)
    redis.call('DEL', 'rq:execution:' .. job .. ':' .. execution)
  end
  redis.call('DEL', key, key .. ':dependents', 'rq:job::' .. job .. ':dependencies', 'rq:executions:' .. job, 'rq:results:' .. job)
end

forget(id)
for delivery in string.gmatch(known[3] or '', '[^ ]+') do
  forget(delivery)
  redis.call('ZREM', KEYS[4], delivery)
end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[1], id)
return {'deleted'}
