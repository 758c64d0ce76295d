-- include: clock.lua
-- include: ledger.lua
-- include: memory.lua
--
-- Register a webhook endpoint, and count the deliveries that it will get of the jobs that its owner has already, if there is
-- room for them. Jobs that are submitted later count theirs themselves (submit.lua).
--
-- ARGV  owner, id of the endpoint, its wire.Subscriber, most endpoints of an owner, most bytes of the owner (0: no limit)
-- Returns {'registered'}, {'too_many', how many the owner has}, or {'over_quota', ...} as submit.lua does.
local RESERVED_S = 86400  -- most of the jobs have ended then
local owner, id, subscriber, max_endpoints, max_bytes = unpack(ARGV)
local endpoints = ENDPOINTS_OF_ .. owner
if redis.call('HEXISTS', endpoints, id) == 1 then return {'registered'} end  -- by a first call, whose answer was lost
local num_endpoints = redis.call('HLEN', endpoints)
if num_endpoints >= tonumber(max_endpoints) then return {'too_many', num_endpoints} end
local num_bytes = 0
if max_bytes ~= '0' then
  local _, limit = exceeds_memory(0)
  check_entries(owner, math.floor(now), 100)
  num_bytes = DELIVERY_BYTES * (try('zset', 'ZCARD', LEDGER_OF_ .. owner) or 0)
  local refusal = num_bytes > 0 and refuse_bytes(owner, num_bytes, tonumber(max_bytes), limit, math.floor(now))
  if refusal then return refusal end
end
redis.call('HSET', endpoints, id, subscriber)
if num_bytes > 0 then write_size(owner, id, num_bytes, math.floor(now) + RESERVED_S) end
return {'registered'}
