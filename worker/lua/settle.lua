-- Write a job's one outcome, wake who waits for it, and let its webhook go. Runs inside the MULTI in which RQ ends the job.
--
-- KEYS  rq:job:<job>, scorepool:outcome:<job>, scorepool:request:<job>, scorepool:done,
--       rq:job:<delivery>, rq:queue:webhooks, rq:queues
-- ARGV  job id, outcome, ttl_s (0: for ever), keep the request ('1' or '0'), delivery id, now, bell
local job, outcome, request, done, delivery, webhooks, queues = unpack(KEYS)
local id, body, ttl_s, keep, delivery_id, iso, bell = unpack(ARGV)

if redis.call('EXISTS', outcome) == 1 then return 0 end  -- a job that is queued again loses its old outcome at the claim
redis.call('SET', outcome, body)
if ttl_s ~= '0' then redis.call('EXPIRE', outcome, ttl_s) end
redis.call('XADD', done, 'MAXLEN', '~', 10000, '*', 'id', id)
redis.call('HDEL', job, 'cancel_requested', 'crashes', 'company')
if keep == '0' then
  redis.call('DEL', request)
elseif ttl_s ~= '0' then
  redis.call('EXPIRE', request, ttl_s)
end

local status = redis.call('HGET', delivery, 'status')
if status and status ~= 'queued' and status ~= 'started' and status ~= 'scheduled' then
  redis.call('HSET', delivery, 'status', 'queued', 'enqueued_at', iso)
  redis.call('HDEL', delivery, 'number_of_retries')  -- another end is another message: its schedule begins anew
  redis.call('PERSIST', delivery)
  redis.call('RPUSH', webhooks, delivery_id)
  redis.call('SADD', queues, webhooks)
  redis.call('PUBLISH', bell, delivery_id)
end
return 1
