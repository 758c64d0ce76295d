-- flags: allow-oom
-- include: wrong_types.lua
--
-- Set the time at which a batch is due next, if the caller's turn is still the current one, and charge its owner.
--
-- KEYS  scorepool:batches, the batch
-- ARGV  id, when it is due (unix, s), number of the turn, owner, seconds of a driver's time that the owner has had
-- Returns whether the time was set.
if redis.call('EXISTS', BATCH_TURNS) == 1 then try('hash', 'HINCRBYFLOAT', BATCH_TURNS, ARGV[4], ARGV[5]) end
if redis.call('HGET', KEYS[2], 'turn') ~= ARGV[3] then return 0 end
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
return 1
