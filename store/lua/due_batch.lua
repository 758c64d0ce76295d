-- Say when a batch is due, if the turn is still the driver's that says so.
--
-- KEYS  scorepool:batches, the batch
-- ARGV  id, when it is due (unix, s), number of the turn
-- Returns whether it is.
if redis.call('HGET', KEYS[2], 'turn') ~= ARGV[3] then return 0 end
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
return 1
