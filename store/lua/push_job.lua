-- include: wake.lua
--
-- A job waits on the list of its queue, or in the registry of scheduled jobs, from which enqueue_due.lua puts it on its queue.
-- If one of the two keys has a wrong type, the job goes to the other, because a job that is in neither never runs.

-- Queue a job, whose hash exists, at once or `delay_s` from now. Set its status to match.
local function push_job(queue, id, delay_s, is_at_front)
  local function push()
    return try('list', is_at_front and 'LPUSH' or 'RPUSH', QUEUE_ .. queue, id) and 'queued'
  end
  local function schedule()
    return try('zset', 'ZADD', SCHEDULED_ .. queue, redis.call('TIME')[1] + delay_s, id) and 'scheduled'
  end
  local status
  if delay_s > 0 then status = schedule() or push() else status = push() or schedule() end
  if status then try('hash', 'HSET', JOB_ .. id, F_STATUS, status) end
  if status == 'queued' then wake(queue, 1) end
end
