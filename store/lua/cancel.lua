-- flags: allow-oom
-- include: end_job.lua
-- include: expiry.lua
--
-- Cancel one job: at once if it waits or its worker is gone, through its worker if it runs. One that has expired has failed,
-- as the API shows it.
--
-- ARGV  id, owner, outcome to record (wire.Failure), seconds for which it is kept if the job does not say, outcome of
--       a job that has expired
-- Returns {'absent'} | {'canceled'} | {'asked'} | {'ended', RQ status}
local id, owner, failure, default_ttl_s, expired = unpack(ARGV)
local job = JOB_ .. id
local known = redis.pcall('HMGET', job, F_OWNER, F_STATUS, F_ORIGIN, F_WORKER_NAME, F_FAILURE_TTL, F_EXPIRES_AT)
local status, queue, worker = known[2] or '', known[3] or '', known[4]
if known[1] ~= owner then
  return {'absent'}
end

local is_expired = has_expired(id, status, known[6])
if status == 'started' and not is_expired and lease_left_s(id) > 0 then
  -- The field cancels the job even if its worker dies. The command makes the worker read the field at once.
  redis.call('HSET', job, F_CANCEL_REQUESTED, '1')
  if worker and worker ~= '' then
    redis.call('PUBLISH', COMMANDS_ .. worker, cjson.encode({command = 'stop-job', job_id = id}))
  end
  return {'asked'}
end
if not is_expired and (status == 'created' or not is_alive(status)) then
  return {'ended', status}
end
-- The worker of a started job may only be late: without the lease, which remove_from_queue takes, it records nothing.
remove_from_queue(id, queue, owner)
if is_expired then
  end_waiting_job(id, queue, 'failed', expired, failure_ttl_s(known[5], default_ttl_s))
  return {'ended', 'failed'}
end
end_waiting_job(id, queue, 'canceled', failure, failure_ttl_s(known[5], default_ttl_s))
return {'canceled'}
