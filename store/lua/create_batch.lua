-- include: clock.lua
-- include: ledger.lua
-- include: memory.lua
-- include: owned_list.lua
--
-- Create a batch that is due at once, if its input file is there and its owner has room for it.
--
-- KEYS  scorepool:batches
-- ARGV  owner, id, id of the input file, state, seconds for which the batch is listed at least, seconds for which the input
--       file is kept at least, most batches of the owner that have not ended, bytes of the batch, most bytes of the owner
--       (0: no limit)
-- Returns {'created'}, or {'known'}: the batch is there already; {'no_file'}; {'too_many'}: so many have not ended; or
--      {'over_quota', ...} as submit.lua does.
local owner, id, file_id, state, listed_s, file_kept_s, max_live, num_bytes, max_bytes = unpack(ARGV)
local batch, file, live = BATCH_ .. id, FILE_ .. file_id, LIVE_BATCHES_OF_ .. owner

-- Return how many batches of the owner have not ended. Before there are too many, those are dropped that are no batches:
-- the previous release noted a batch before it created it, and could fail in between.
local function num_live()
  if (try('set', 'SCARD', live) or 0) >= tonumber(max_live) then
    for _, other in ipairs(try('set', 'SMEMBERS', live) or {}) do
      if not redis.call('ZSCORE', KEYS[1], other) then redis.call('SREM', live, other) end
    end
  end
  return try('set', 'SCARD', live) or 0
end

redis.call('ZCARD', KEYS[1])  -- an error if it is of a wrong type
if redis.call('HEXISTS', batch, F_OWNER) == 1 then return {'known'} end
if redis.pcall('HGET', file, F_OWNER) ~= owner then return {'no_file'} end
if num_live() >= tonumber(max_live) then return {'too_many'} end
local is_counted = max_bytes ~= '0'
if is_counted then
  local _, limit = exceeds_memory(0)
  check_entries(owner, math.floor(now), 100)
  local refusal = refuse_bytes(owner, tonumber(num_bytes), tonumber(max_bytes), limit, math.floor(now))
  if refusal then return refusal end
end

redis.call('HSET', batch, F_OWNER, owner, 'state', state)
redis.call('ZADD', KEYS[1], 0, id)
redis.call('HSET', file, READER_ .. id, '1')
for _, key in ipairs({file, file .. _PARTS, FILES_OF_ .. owner}) do redis.call('EXPIRE', key, file_kept_s, 'GT') end
try('set', 'SADD', live, id)
add_to_list(BATCHES_OF_ .. owner, id, now, listed_s)
if is_counted then
  write_size(owner, id, tonumber(num_bytes), later(now))
  schedule_check(owner, now)
end
return {'created'}
