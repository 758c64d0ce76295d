-- include: clock.lua
-- include: ledger.lua
-- include: memory.lua
--
-- Store a chunk of a file, if Redis and the owner have room for it. The chunks of a file that is refused are removed.
--
-- ARGV  owner, id of the file, number of the chunk, the chunk, seconds that the chunks are kept, most bytes of the owner
-- Returns {'stored'}, {'no_memory'}, or {'over_quota', ...} as submit.lua does.
local owner, id, number, chunk, ttl_s, max_bytes = unpack(ARGV)
local parts = FILE_ .. id .. _PARTS
local num_known = try('hash', 'HSTRLEN', parts, number) or 0  -- of a first call, whose reply was lost
local num_bytes = num_known > 0 and #chunk - num_known or #chunk + (number == '0' and FILE_BYTES or 0)
local is_full, limit = exceeds_memory(MEMORY_FOR_NEW)
local is_counted = max_bytes ~= '0'
if is_counted then check_entries(owner, math.floor(now), 100) end
local refusal = is_full and {'no_memory'} or refuse_bytes(owner, num_bytes, tonumber(max_bytes), limit, math.floor(now))
if refusal then
  redis.call('UNLINK', parts)
  remove_size(owner, id)
  return refusal
end
redis.call('HSET', parts, number, chunk)
redis.call('EXPIRE', parts, ttl_s)
if is_counted then
  write_size(owner, id, read_size(owner, id) + num_bytes, math.floor(now) + ttl_s + 1)
  schedule_check(owner, now)
end
return {'stored'}
