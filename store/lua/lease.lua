-- include: expiry.lua
--
-- A lease is three keys of RQ's own:
--   rq:execution:<job>:<execution>   hash that expires when the lease is over: Redis's clock, not the workers', decides
--   rq:executions:<job>              zset of the job's executions
--   rq:wip:<queue>                   zset of <job>:<execution>, scored by the time at which RQ's own cleaners may take it
-- That score lies a grace beyond the lease's end, because those cleaners (any `rq info` runs one) spend the job's Retry
-- and write no outcome; reclaim.lua comes first.

-- Write the hash of a lease, which expires with the lease. A key of a wrong type is replaced: without its hash the lease
-- would never end.
local function write_execution(lease_key, lease_ms, ...)
  local key = EXECUTION_ .. lease_key
  if not try('hash', 'HSET', key, ...) then
    redis.call('DEL', key)
    redis.call('HSET', key, ...)
  end
  redis.call('PEXPIRE', key, lease_ms)
end

-- Lease a job. A job past its expires_at keeps its status, because the API shows it as failed already and its worker only
-- records this. Return the row that worker/claims/leases.py reads: {queue's index, job id, execution id, job's hash as it was
-- before, request or false, now}.
local function lease(index, id, execution, wip, worker, lease_ms, grace_s)
  local job, lease_key = JOB_ .. id, id .. ':' .. execution
  local fields = redis.call('HGETALL', job)
  local created, expires_at = unpack(redis.call('HMGET', job, F_CREATED, F_EXPIRES_AT))
  local started = math.max(now, tonumber(created or '') or 0)  -- the clock may have been set back
  local iso = iso_time(started < now + 86400 and started or now)
  write_execution(lease_key, lease_ms, 'id', execution, 'created_at', now, 'last_heartbeat', now, 'worker_name', worker, 'begun', 0)
  if try('zset', 'ZADD', EXECUTIONS_ .. id, now + grace_s, execution) then
    redis.call('EXPIRE', EXECUTIONS_ .. id, grace_s)
  end
  redis.call('ZADD', wip, now + grace_s, lease_key)  -- the caller has checked its type
  redis.call('HSET', job, F_LAST_HEARTBEAT, iso, F_WORKER_NAME, worker,
    unpack(is_past(expires_at) and {} or {F_STATUS, 'started', F_STARTED_AT, iso}))
  redis.call('PERSIST', job)
  redis.call('PERSIST', REQUEST_ .. id)  -- the request of a failed job that was queued again by hand has a time to live
  local request = redis.pcall('GET', REQUEST_ .. id)
  request = type(request) == 'string' and request  -- a request of another type counts as missing
  return {index, id, execution, fields, request, string.format('%.6f', now)}
end

-- Take a lease away from its worker. The caller has checked the type of the registry.
local function end_lease(id, execution, wip)
  redis.call('ZREM', wip, id .. ':' .. execution)
  redis.call('DEL', EXECUTION_ .. id .. ':' .. execution)
  try('zset', 'ZREM', EXECUTIONS_ .. id, execution)
end
