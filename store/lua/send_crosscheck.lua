-- include: wrong_types.lua
--
-- Put a message into the inbox of a live worker. The inbox expires if the worker does not empty it in time: it holds
-- the tokens of jobs, which may have been deleted since.
--
-- ARGV  worker, message, most messages in an inbox, most bytes of it, seconds until it expires
-- Returns whether the inbox has it: false if the worker is gone, behind, or its inbox has a wrong type.
local worker, message, max_messages, max_bytes, ttl_s = unpack(ARGV)
local inbox = CROSSCHECK_INBOX_ .. worker
local length = try('list', 'LLEN', inbox)
if not length or length >= tonumber(max_messages) or redis.call('EXISTS', SERVED_MODEL_ .. worker) == 0 then return 0 end
local size_bytes = 0
for _, waiting in ipairs(redis.call('LRANGE', inbox, 0, -1)) do size_bytes = size_bytes + #waiting end
if size_bytes >= tonumber(max_bytes) then return 0 end
redis.call('RPUSH', inbox, message)
if length == 0 then redis.call('EXPIRE', inbox, ttl_s) end
return 1
