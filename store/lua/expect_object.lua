-- flags: allow-oom
--
-- Note that a worker is about to write the object of a lease, so that it is deleted if the job never needs it.
--
-- ARGV  key of the lease, seconds until the object is checked
local now_s = tonumber(redis.call('TIME')[1])
redis.call('ZADD', STORED_RESULTS, now_s + ARGV[2], ARGV[1])
