-- Write a job's one outcome, wake who waits for it, and let its webhooks go. Runs inside the MULTI in which RQ ends the
-- job. Put wire.OUTBOX before it.
--
-- KEYS  rq:job:<job>, scorepool:outcome:<job>, scorepool:request:<job>, scorepool:done, scorepool:outcomes
-- ARGV  job id, outcome, ttl_s (0: for ever), keep the request ('1' or '0'), now
local job, outcome, request, done, outcomes = unpack(KEYS)
local id, body, ttl_s, keep, iso = unpack(ARGV)

if redis.call('EXISTS', outcome) == 1 then return 0 end  -- a job that is queued again loses its old outcome at the claim
redis.call('SET', outcome, body)
if ttl_s ~= '0' then redis.call('EXPIRE', outcome, ttl_s) end
redis.call('XADD', done, 'MAXLEN', '~', 10000, '*', 'id', id)
local code = 'result'
if redis.call('HGET', job, 'status') ~= 'finished' then
  local is_read, failure = pcall(cmsgpack.unpack, body)
  code = is_read and type(failure) == 'table' and failure.code or 'internal'
end
redis.call('HINCRBY', outcomes, code, 1)
redis.call('HDEL', job, 'cancel_requested', 'crashes', 'company')
if keep == '0' then
  redis.call('DEL', request)
elseif ttl_s ~= '0' then
  redis.call('EXPIRE', request, ttl_s)
end

announce(id, iso, ttl_s == '0' and KEPT_S or tonumber(ttl_s))
return 1
