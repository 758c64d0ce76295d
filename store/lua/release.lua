-- flags: allow-oom
-- include: wake.lua
--
-- Put jobs that a worker holds back at the front of their queues, as if it had never claimed them.
--
-- KEYS  list and wip registry of each lease, the last to be claimed first
-- ARGV  key of each lease, <job>:<execution>
-- Returns how many were put back. Leases that were taken away are left alone, and so are those of a queue with a key of a
-- wrong type: they expire.
local num_back = 0
for i, lease_key in ipairs(ARGV) do
  local list, wip = KEYS[2 * i - 1], KEYS[2 * i]
  local id, execution = string.match(lease_key, '^(.*):(.*)$')
  local job = JOB_ .. id
  if is_type(list, 'list') and is_type(wip, 'zset') and redis.call('ZREM', wip, lease_key) == 1 then
    redis.call('DEL', EXECUTION_ .. lease_key, OUTCOME_UPLOAD_ .. lease_key)
    try('zset', 'ZREM', EXECUTIONS_ .. id, execution)
    if redis.pcall('HEXISTS', job, F_DATA) == 1 then
      redis.call('HSET', job, F_STATUS, 'queued', F_STARTED_AT, '', F_WORKER_NAME, '')
      redis.call('LPUSH', list, id)
      num_back = num_back + 1
      wake(string.sub(list, #QUEUE_ + 1), 1)
    end
  end
end
return num_back
