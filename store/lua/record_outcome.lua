-- Put wire.OUTBOX before it.

-- Write a job's one outcome, wake who waits for it, and let its webhooks go: part of what ends the job, whose status is
-- set. `ttl_s` 0 keeps the outcome for ever.
local function record_outcome(id, body, ttl_s, keep_request, iso)
  local job, outcome, request = 'rq:job:' .. id, 'scorepool:outcome:' .. id, 'scorepool:request:' .. id
  local kept = ttl_s > 0 and {'EX', ttl_s} or {}
  if not redis.call('SET', outcome, body, 'NX', unpack(kept)) then return end  -- a job that is queued again loses its old outcome at the claim
  redis.call('XADD', 'scorepool:done', 'MAXLEN', '~', 10000, '*', 'id', id)
  local code = 'result'
  if redis.call('HGET', job, 'status') ~= 'finished' then
    local is_read, failure = pcall(cmsgpack.unpack, body)
    code = is_read and type(failure) == 'table' and failure.code or 'internal'
  end
  redis.call('HINCRBY', 'scorepool:outcomes', code, 1)
  redis.call('HDEL', job, 'cancel_requested', 'crashes', 'company')
  if not keep_request then
    redis.call('DEL', request)
  elseif ttl_s > 0 then
    redis.call('EXPIRE', request, ttl_s)
  end
  announce(id, iso, ttl_s > 0 and ttl_s or KEPT_S)
end
