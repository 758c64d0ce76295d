-- include: clock.lua
-- include: push_delivery.lua
--
-- Put deliveries back on their queue, to begin their schedule anew.
--
-- ARGV  owner, '1': only those that failed; then the deliveries' ids
-- Returns for each: 'absent', 'replayed', 'not failed' (only with '1'), or RQ's status of a delivery that has not ended.
local owner, only_failed = unpack(ARGV, 1, 2)
local answers = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = JOB_ .. id
  local known = redis.pcall('HMGET', key, F_OWNER, F_STATUS, F_EVENT)
  local status = known[2]
  if known[1] ~= owner or not known[3] then
    answers[#answers + 1] = 'absent'
  elseif only_failed == '1' and status ~= 'failed' then
    answers[#answers + 1] = 'not failed'
  elseif status == 'queued' or status == 'deferred' or status == 'started' then
    answers[#answers + 1] = status
  else
    for _, registry in ipairs({FINISHED_, FAILED_, CANCELED_, SCHEDULED_}) do
      try('zset', 'ZREM', registry .. WEBHOOKS, id)
    end
    redis.call('HSET', key, F_ENQUEUED_AT, iso_now, F_SCHEDULED_FROM, string.format('%.6f', now), F_NUM_ATTEMPTS, '0', F_REASON, '',
      F_RETRIES_LEFT, '9', F_ENDED_AT, '')
    redis.call('HDEL', key, F_NUMBER_OF_RETRIES, F_CRASHES, F_CANCEL_REQUESTED)
    redis.call('PERSIST', key)
    try('set', 'SADD', QUEUES, QUEUE_ .. WEBHOOKS)
    push_delivery(owner, id, string.format('%.6f', now))
    answers[#answers + 1] = 'replayed'
  end
end
return answers
