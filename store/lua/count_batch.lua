-- include: clock.lua
-- include: ledger.lua
-- include: memory.lua
--
-- Count a batch that is about to be created, if its owner has room for it.
--
-- ARGV  owner, id, bytes, most bytes of the owner, seconds until the entry is checked: the creation may have failed then
-- Returns {'counted'}, or {'over_quota', ...} as submit.lua does.
local owner, id, num_bytes, max_bytes, check_s = unpack(ARGV)
local _, limit = exceeds_memory(0)
check_entries(owner, math.floor(now), 100)
local refusal = refuse_bytes(owner, tonumber(num_bytes), tonumber(max_bytes), limit, math.floor(now))
if refusal then return refusal end
write_size(owner, id, tonumber(num_bytes), math.floor(now) + check_s)
schedule_check(owner, now)
return {'counted'}
