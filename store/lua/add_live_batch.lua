-- include: wrong_types.lua
--
-- Note a batch that is about to be created among those of its owner that have not ended, if there are few enough.
--
-- KEYS  scorepool:batches
-- ARGV  owner, id, most batches of an owner that have not ended
-- Returns whether it was noted.
local live, most = LIVE_BATCHES_OF_ .. ARGV[1], tonumber(ARGV[3])
if (try('set', 'SCARD', live) or 0) >= most then
  for _, id in ipairs(try('set', 'SMEMBERS', live) or {}) do  -- the creation of some may have failed
    if not redis.call('ZSCORE', KEYS[1], id) then redis.call('SREM', live, id) end
  end
  if (try('set', 'SCARD', live) or 0) >= most then return 0 end
end
try('set', 'SADD', live, ARGV[2])
return 1
