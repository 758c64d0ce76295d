-- flags: allow-oom
-- include: lease.lua
-- include: is_held.lua
-- include: is_recorded.lua
--
-- Extend the leases that a worker still holds.
--
-- KEYS  wip registry of each lease
-- ARGV  worker, lease_ms, grace_s, then the key of each lease, <job>:<execution>
-- Returns {keys of leases that were taken away or whose job was deleted, keys of leases whose job's owner canceled it,
-- keys of a wrong type}. A lease in a registry of a wrong type is held until it expires.
local worker, lease_ms, grace_s = ARGV[1], ARGV[2], ARGV[3]
local lost, canceled = {}, {}
local iso = iso_time(now)
local now_s = math.floor(now)

for i, wip in ipairs(KEYS) do
  local lease_key = ARGV[3 + i]
  local id, execution = string.match(lease_key, '^(.*):(.*)$')
  if not is_held(wip, lease_key) then
    if not is_recorded(id, lease_key) then lost[#lost + 1] = lease_key end  -- its worker is told when it asks again
  elseif redis.pcall('HEXISTS', JOB_ .. id, F_DATA) ~= 1 then
    try('zset', 'ZREM', wip, lease_key)
    redis.call('DEL', EXECUTION_ .. lease_key, EXECUTIONS_ .. id, OUTCOME_UPLOAD_ .. lease_key)
    lost[#lost + 1] = lease_key
  else
    write_execution(lease_key, lease_ms, 'id', execution, 'last_heartbeat', now_s, 'worker_name', worker)
    -- The hash is new if it had expired while Redis was away, and nobody reclaimed the job.
    redis.call('HSETNX', EXECUTION_ .. lease_key, 'created_at', now_s)
    try('zset', 'ZADD', wip, now_s + grace_s, lease_key)
    if try('zset', 'ZADD', EXECUTIONS_ .. id, now_s + grace_s, execution) then
      redis.call('EXPIRE', EXECUTIONS_ .. id, grace_s)
    end
    redis.call('HSET', JOB_ .. id, F_LAST_HEARTBEAT, iso)
    if redis.call('HGET', JOB_ .. id, F_CANCEL_REQUESTED) == '1' then canceled[#canceled + 1] = lease_key end
  end
end
return {lost, canceled, wrong_types}
