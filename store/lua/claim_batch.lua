-- flags: allow-oom
-- Lease the batch that has been due for the longest time to one driver.
--
-- KEYS  scorepool:batches
-- ARGV  seconds of the lease, prefix of the batches' keys
-- Returns {id, owner, state, cancel or false, number of the turn, now (unix, s)}, or false if none is due.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6  -- Redis's clock, because the drivers' clocks may differ
local id = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.6f', now), 'LIMIT', 0, 1)[1]
if not id then return false end
local key = ARGV[2] .. id
local known = redis.call('HMGET', key, 'owner', 'state', 'cancel')
if not known[2] then  -- the batch was deleted by hand
  redis.call('ZREM', KEYS[1], id)
  return false
end
redis.call('ZADD', KEYS[1], string.format('%.6f', now + ARGV[1]), id)
return {id, known[1], known[2], known[3], redis.call('HINCRBY', key, 'turn', 1), string.format('%.6f', now)}
