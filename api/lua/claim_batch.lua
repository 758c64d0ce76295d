-- Give the batch that is due longest to one driver.
--
-- KEYS  scorepool:batches
-- ARGV  now (unix, s), when the lease ends, prefix of the batches' keys
-- Returns {id, owner, state, cancel or false, number of the turn}, or false if none is due.
local id = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1)[1]
if not id then return false end
local key = ARGV[3] .. id
local known = redis.call('HMGET', key, 'owner', 'state', 'cancel')
if not known[2] then  -- somebody deleted it by hand
  redis.call('ZREM', KEYS[1], id)
  return false
end
redis.call('ZADD', KEYS[1], ARGV[2], id)
return {id, known[1], known[2], known[3], redis.call('HINCRBY', key, 'turn', 1)}
