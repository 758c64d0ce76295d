-- Cancel one job: at once if it waits, by asking its worker if it runs. Put wire.OUTBOX before it.
--
-- KEYS     the job's RQ hash, its request, its outcome, the stream of ended jobs, how many ended by code
-- ARGV     id, owner, outcome to record (wire.Failure), seconds that an outcome is kept, now (ISO), now (unix, s),
--          prefix of the workers' channels
--
-- Returns {'absent'} | {'canceled'} | {'asked'} | {'ended', RQ status}

local job, request, outcome, done = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, owner, failure, ttl, iso, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local workers = ARGV[7]

local known = redis.call('HMGET', job, 'owner', 'status', 'origin', 'worker_name')
local status, queue, worker = known[2] or '', known[3] or '', known[4]
if known[1] ~= owner then
  return {'absent'}
end

if status == 'started' then
  -- The mark is what counts: it survives the worker. The command only makes the worker look at once.
  redis.call('HSET', job, 'cancel_requested', '1')
  if worker and worker ~= '' then
    redis.call('PUBLISH', workers .. worker, cjson.encode({command = 'stop-job', job_id = id}))
  end
  return {'asked'}
end
if status ~= 'queued' and status ~= 'deferred' and status ~= 'scheduled' then
  return {'ended', status}
end

redis.call('LREM', 'rq:queue:' .. queue, 0, id)
redis.call('ZREM', 'rq:scheduled:' .. queue, id)
redis.call('ZREM', 'rq:deferred:' .. queue, id)

-- RQ forgets canceled jobs never; here they leave with their outcome.
local canceled = 'rq:canceled:' .. queue
redis.call('ZREMRANGEBYSCORE', canceled, '-inf', now - ttl)
redis.call('ZADD', canceled, now, id)
redis.call('HSET', job, 'status', 'canceled', 'ended_at', iso)
redis.call('EXPIRE', job, ttl)

redis.call('DEL', request)
redis.call('SET', outcome, failure, 'EX', ttl)
redis.call('XADD', done, 'MAXLEN', '~', 10000, '*', 'id', id)
redis.call('HINCRBY', KEYS[5], 'canceled', 1)
announce(id, iso, tonumber(ttl))
return {'canceled'}
