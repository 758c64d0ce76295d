-- Put before claim.lua and reclaim.lua.
--
-- A lease is three keys of RQ's own:
--   rq:execution:<job>:<execution>   hash that expires when the lease is over: Redis's clock, not the workers', decides
--   rq:executions:<job>              zset of the job's executions
--   rq:wip:<queue>                   zset of <job>:<execution>, scored by the time at which RQ's own cleaners may take it
-- That score lies a grace beyond the lease's end, because those cleaners (any `rq info` runs one) spend the job's Retry
-- and write no outcome; reclaim.lua comes first.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6  -- unix, s: Redis's clock, not the workers', decides here, too

-- The row that worker/rq/leases.py reads: {queue's index, job id, execution id, job's hash as it was before, request or false,
-- now}.
local function lease(index, id, execution, wip, worker, lease_ms, iso, grace_s)
  local job, member = 'rq:job:' .. id, id .. ':' .. execution
  local fields = redis.call('HGETALL', job)
  redis.call('HSET', 'rq:execution:' .. member,
    'id', execution, 'created_at', now, 'last_heartbeat', now, 'worker_name', worker)
  redis.call('PEXPIRE', 'rq:execution:' .. member, lease_ms)
  redis.call('ZADD', 'rq:executions:' .. id, now + grace_s, execution)
  redis.call('EXPIRE', 'rq:executions:' .. id, grace_s)
  redis.call('ZADD', wip, now + grace_s, member)
  redis.call('HSET', job, 'status', 'started', 'started_at', iso, 'last_heartbeat', iso, 'worker_name', worker)
  redis.call('PERSIST', job)
  redis.call('PERSIST', 'scorepool:request:' .. id)  -- it expires where a failed job was queued again by hand
  local request = redis.pcall('GET', 'scorepool:request:' .. id)
  request = type(request) == 'string' and request  -- of another type it is none
  return {index, id, execution, fields, request, string.format('%.6f', now)}
end
