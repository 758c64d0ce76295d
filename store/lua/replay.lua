-- Put deliveries back on their queue, to begin their schedule anew.
--
-- ARGV  owner, name of the queue, bell, now (unix, s), now (ISO), '1': only those that failed; then the deliveries' ids
--
-- Returns for each: 'absent', 'replayed', 'failed not' (only with '1'), or RQ's status of one that is on its way now.

local owner, queue, bell, now, iso, only_failed = unpack(ARGV, 1, 6)
local answers = {}
for i = 7, #ARGV do
  local id = ARGV[i]
  local key = 'rq:job:' .. id
  local known = redis.call('HMGET', key, 'owner', 'status', 'event')
  local status = known[2]
  if known[1] ~= owner or not known[3] then
    answers[#answers + 1] = 'absent'
  elseif only_failed == '1' and status ~= 'failed' then
    answers[#answers + 1] = 'failed not'
  elseif status == 'queued' or status == 'started' then
    answers[#answers + 1] = status
  else
    for _, registry in ipairs({'finished', 'failed', 'canceled', 'deferred', 'scheduled'}) do
      redis.call('ZREM', 'rq:' .. registry .. ':' .. queue, id)
    end
    redis.call('HSET', key, 'status', 'queued', 'enqueued_at', iso, 'since', now, 'tries', '0', 'reason', '',
      'retries_left', '9', 'ended_at', '')
    redis.call('HDEL', key, 'number_of_retries', 'crashes', 'cancel_requested')
    redis.call('PERSIST', key)
    redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
    redis.call('RPUSH', 'rq:queue:' .. queue, id)
    redis.call('PUBLISH', bell, id)
    answers[#answers + 1] = 'replayed'
  end
end
return answers
