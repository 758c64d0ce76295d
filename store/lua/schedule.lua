-- include: writes.lua
--
-- Queue a job again after a delay, or at once if the registry of scheduled jobs has a wrong type.
--
-- ARGV  queue, id, delay in seconds
if not try('zset', 'ZADD', SCHEDULED_ .. ARGV[1], redis.call('TIME')[1] + ARGV[3], ARGV[2]) then
  try('list', 'RPUSH', QUEUE_ .. ARGV[1], ARGV[2])
end
return wrong_types
