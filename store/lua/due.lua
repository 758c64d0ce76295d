-- Put scheduled jobs whose time has come on their queues, each in one step: two schedulers cannot both queue it.
--
-- KEYS  rq:scheduled:<queue>, rq:queue:<queue>, rq:queues, of each queue
-- ARGV  now (ISO), then the bell of each queue
local now, iso = redis.call('TIME')[1], ARGV[1]

local function is_at_front(job)  -- as rq.job.Job.should_enqueue_at_front
  local always, on_retry, ended_at = unpack(redis.call('HMGET', job, 'enqueue_at_front', 'enqueue_at_front_on_retry', 'ended_at'))
  return always == '1' or (on_retry == '1' and ended_at and ended_at ~= '')
end

for i = 1, #KEYS, 3 do
  local scheduled, queue, queues, bell = KEYS[i], KEYS[i + 1], KEYS[i + 2], ARGV[1 + (i + 2) / 3]
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, 1000)) do
    local job = 'rq:job:' .. id
    redis.call('ZREM', scheduled, id)
    if redis.call('HGET', job, 'status') == 'scheduled' then  -- not one that expired, or was canceled meanwhile
      redis.call('HSET', job, 'status', 'queued', 'enqueued_at', iso)
      redis.call('SADD', queues, queue)
      redis.call(is_at_front(job) and 'LPUSH' or 'RPUSH', queue, id)
      redis.call('PUBLISH', bell, id)
    end
  end
end
