-- flags: allow-oom
-- include: ledger.lua
--
-- Delete a webhook endpoint, and what is counted of the deliveries that it would have got (register_endpoint.lua).
--
-- ARGV  owner, id of the endpoint
-- Returns whether the owner had it.
local owner, id = ARGV[1], ARGV[2]
local is_deleted = redis.call('HDEL', ENDPOINTS_OF_ .. owner, id)
remove_size(owner, id)
return is_deleted
