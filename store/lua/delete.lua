-- flags: allow-oom
-- include: end_job.lua
-- include: expiry.lua
-- include: unserved.lua
-- include: stored_result.lua
--
-- Delete a job that has ended, and its deliveries, in whatever state they are. One that has expired has ended: the API
-- shows it as failed.
--
-- ARGV  id, owner
-- Returns {'absent'} | {'deleted'} | {'alive', RQ status}
local id, owner = ARGV[1], ARGV[2]
local known = redis.pcall('HMGET', JOB_ .. id, F_OWNER, F_STATUS, F_DELIVERIES, F_EXPIRES_AT, F_ORIGIN)
if known[1] ~= owner then
  return {'absent'}
end
if has_expired(id, known[2], known[4]) then
  remove_from_queue(id, known[5] or '', owner)
elseif is_alive(known[2]) then
  return {'alive', known[2]}
end

-- Delete a job as rq.job.Job.delete does. A worker that still holds the delivery finds its lease gone and records nothing.
local function delete(job_id)
  local key = JOB_ .. job_id
  local queue = redis.pcall('HGET', key, F_ORIGIN)
  if type(queue) ~= 'string' then
    return
  end
  try('list', 'LREM', QUEUE_ .. queue, 0, job_id)
  for _, registry in ipairs({FINISHED_, FAILED_, CANCELED_, DEFERRED_, SCHEDULED_}) do
    try('zset', 'ZREM', registry .. queue, job_id)
  end
  drop_leases(job_id, queue)
  redis.call('DEL', key, key .. _DEPENDENTS, JOB_ .. ':' .. job_id .. _DEPENDENCIES, RESULTS_ .. job_id)
end

delete(id)
for delivery in string.gmatch(known[3] or '', '[^ ]+') do
  delete(delivery)
  remove_size(owner, delivery)
  try('zset', 'ZREM', DELIVERIES_OF_ .. owner, delivery)
end
local execution = stored_execution(id)
if execution then try('zset', 'ZADD', STORED_RESULTS, 'XX', now_s, id .. ':' .. execution) end  -- its object goes at once
redis.call('DEL', REQUEST_ .. id, RESPONSE_ .. id, OUTCOME_ .. id, CHECKPOINT_ .. id)
remove_size(owner, id)
try('zset', 'ZREM', JOBS_OF_ .. owner, id)
if try('set', 'SISMEMBER', UNSERVED_OF_ .. owner, known[5] or '') == 1 then check_unserved(owner, known[5], now_s) end
for _, list in ipairs({JOBS_OF_ .. owner, DELIVERIES_OF_ .. owner}) do
  if redis.call('EXISTS', list, LEDGER_OF_ .. owner) == 0 then try('zset', 'ZREM', SWEEP_SCHEDULE, list) end
end
return {'deleted'}
