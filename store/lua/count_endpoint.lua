-- include: clock.lua
-- include: ledger.lua
-- include: memory.lua
--
-- Count the deliveries that a new webhook endpoint will get of the jobs that its owner has already, if there is room for them.
-- Jobs that are submitted later count theirs themselves (submit.lua).
--
-- ARGV  owner, id of the endpoint, most bytes of the owner
-- Returns {'counted'}, or {'over_quota', ...} as submit.lua does.
local RESERVED_S = 86400  -- most of the jobs have ended then
local owner, id, max_bytes = unpack(ARGV)
local _, limit = exceeds_memory(0)
check_entries(owner, math.floor(now), 100)
local num_bytes = DELIVERY_BYTES * (try('zset', 'ZCARD', LEDGER_OF_ .. owner) or 0)
if num_bytes == 0 then return {'counted'} end
local refusal = refuse_bytes(owner, num_bytes, tonumber(max_bytes), limit, math.floor(now))
if refusal then return refusal end
write_size(owner, id, num_bytes, math.floor(now) + RESERVED_S)
return {'counted'}
