-- flags: allow-oom
-- include: clock.lua
-- include: wrong_types.lua
--
-- Lease a batch to one driver: of the owners that have a batch that is due, that whose batches have had least of the drivers'
-- time; of its batches the one that has been due for the longest time.
--
-- KEYS  scorepool:batches
-- ARGV  seconds of the lease
-- Returns {id, owner, state, cancel or false, number of the turn, now (unix, s)}, or false if none is due.
local MAX_SEEN, KEPT_S = 5000, 3600
local clock = tonumber(try('hash', 'HGET', BATCH_TURNS, '') or '') or 0
local clocks, best, best_owner = {}, nil, nil
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.6f', now), 'LIMIT', 0, MAX_SEEN)) do
  local owner = redis.call('HGET', BATCH_ .. id, 'owner')
  if not owner then  -- the batch was deleted by hand
    redis.call('ZREM', KEYS[1], id)
  elseif not clocks[owner] then
    clocks[owner] = math.max(clock, tonumber(try('hash', 'HGET', BATCH_TURNS, owner) or '') or 0)
    if not best or clocks[owner] < clocks[best_owner] then best, best_owner = id, owner end
  end
end
if not best then return false end
local text = string.format('%.6f', clocks[best_owner])
try('hash', 'HSET', BATCH_TURNS, '', text, best_owner, text)  -- an owner that comes back does not get what it has missed
redis.call('EXPIRE', BATCH_TURNS, KEPT_S)
redis.call('ZADD', KEYS[1], string.format('%.6f', now + ARGV[1]), best)
local key = BATCH_ .. best
local state, cancel = unpack(redis.call('HMGET', key, 'state', 'cancel'), 1, 2)
return {best, best_owner, state, cancel, redis.call('HINCRBY', key, 'turn', 1), string.format('%.6f', now)}
