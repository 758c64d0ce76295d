-- include: wrong_types.lua
--
-- Put a message into the inbox of a live worker. It expires if the worker does not read it in time.
--
-- ARGV  worker, message, most messages in an inbox, seconds until they expire
-- Returns whether the inbox has it: false if the worker is gone, behind, or its inbox has a wrong type.
local worker, message, max_messages, ttl_s = unpack(ARGV)
local inbox = CROSSCHECK_INBOX_ .. worker
local length = try('list', 'LLEN', inbox)
if not length or length >= tonumber(max_messages) or redis.call('EXISTS', SERVED_MODEL_ .. worker) == 0 then return 0 end
redis.call('RPUSH', inbox, message)
redis.call('EXPIRE', inbox, ttl_s)
return 1
