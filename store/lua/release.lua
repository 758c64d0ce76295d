-- Put jobs that a worker holds back at the front of their queues, as if it had never claimed them.
--
-- KEYS  rq:queue:<queue>, rq:wip:<queue> of each lease, the last to be claimed first
-- ARGV  <job>:<execution> of each lease
-- Returns how many were put back; those that were taken away meanwhile are left alone.
local num_back = 0
for i, member in ipairs(ARGV) do
  local id, execution = string.match(member, '^(.*):(.*)$')
  local job = 'rq:job:' .. id
  if redis.call('ZREM', KEYS[2 * i], member) == 1 then
    redis.call('DEL', 'rq:execution:' .. member)
    redis.call('ZREM', 'rq:executions:' .. id, execution)
    if redis.pcall('HEXISTS', job, 'data') == 1 then
      redis.call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '')
      redis.call('LPUSH', KEYS[2 * i - 1], id)
      num_back = num_back + 1
    end
  end
end
return num_back
