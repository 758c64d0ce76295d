-- flags: allow-oom
-- include: clock.lua
-- include: backlog.lua
-- include: wake.lua
--
-- Put scheduled jobs whose time has come on their queues, each in one step: two schedulers cannot both queue it. A job of the
-- API goes where a new one goes (backlog.lua): one that is postponed again and again would keep the list full, and jobs in
-- backlogs would never have their turn.
--
-- ARGV  the name of each queue
-- Returns the keys of a wrong type.
local function is_at_front(job)  -- as rq.job.Job.should_enqueue_at_front
  local always, on_retry, ended_at =
    unpack(redis.call('HMGET', job, F_ENQUEUE_AT_FRONT, F_ENQUEUE_AT_FRONT_ON_RETRY, F_ENDED_AT))
  return always == '1' or (on_retry == '1' and ended_at and ended_at ~= '')
end

for i = 1, #ARGV do
  local name = ARGV[i]
  local scheduled, list = SCHEDULED_ .. name, QUEUE_ .. name
  local num_queued = 0
  local ids = is_type(list, 'list') and try('zset', 'ZRANGEBYSCORE', scheduled, '-inf', string.format('%.6f', now), 'LIMIT', 0, 1000) or {}
  for _, id in ipairs(ids) do
    local job = JOB_ .. id
    redis.call('ZREM', scheduled, id)
    if redis.pcall('HGET', job, F_STATUS) == 'scheduled' then  -- skip jobs that expired or were canceled in between
      redis.call('HSET', job, F_STATUS, 'queued', F_ENQUEUED_AT, iso_now)
      try('set', 'SADD', QUEUES, list)
      local owner = redis.call('HGET', job, F_OWNER)
      if not owner or not join_backlog(name, owner, id, string.format('%.6f', now)) then
        redis.call(is_at_front(job) and 'LPUSH' or 'RPUSH', list, id)
      end
      num_queued = num_queued + 1
    end
  end
  wake(name, num_queued)
end
return wrong_types
