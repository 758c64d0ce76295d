-- flags: allow-oom
-- Set the time at which a batch is due next, if the caller's turn is still the current one.
--
-- KEYS  scorepool:batches, the batch
-- ARGV  id, when it is due (unix, s), number of the turn
-- Returns whether the time was set.
if redis.call('HGET', KEYS[2], 'turn') ~= ARGV[3] then return 0 end
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
return 1
