-- Extend the leases that a worker still holds.
--
-- KEYS  rq:wip:<queue> of each lease
-- ARGV  worker, lease_ms, iso, grace_s, then <job>:<execution> of each lease
-- Returns {members that were taken away or whose job was deleted, members whose owner asked to cancel them}.
local worker, lease_ms, iso, grace_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = tonumber(redis.call('TIME')[1])
local lost, canceled = {}, {}
for i, wip in ipairs(KEYS) do
  local member = ARGV[4 + i]
  local id, execution = string.match(member, '^(.*):(.*)$')
  if not redis.call('ZSCORE', wip, member) then
    lost[#lost + 1] = member
  elseif redis.pcall('HEXISTS', 'rq:job:' .. id, 'data') ~= 1 then
    redis.call('ZREM', wip, member)
    redis.call('DEL', 'rq:execution:' .. member, 'rq:executions:' .. id)
    lost[#lost + 1] = member
  else
    local key = 'rq:execution:' .. member
    redis.call('HSET', key, 'id', execution, 'last_heartbeat', now, 'worker_name', worker)
    redis.call('HSETNX', key, 'created_at', now)  -- it had expired while Redis was away, and nobody reclaimed it
    redis.call('PEXPIRE', key, lease_ms)
    redis.call('ZADD', wip, now + grace_s, member)
    redis.call('ZADD', 'rq:executions:' .. id, now + grace_s, execution)
    redis.call('EXPIRE', 'rq:executions:' .. id, grace_s)
    redis.call('HSET', 'rq:job:' .. id, 'last_heartbeat', iso)
    if redis.call('HGET', 'rq:job:' .. id, 'cancel_requested') == '1' then canceled[#canceled + 1] = member end
  end
end
return {lost, canceled}
