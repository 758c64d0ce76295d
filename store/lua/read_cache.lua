-- include: cache.lua
-- include: clock.lua
--
-- Look entries of the result cache up.
--
-- ARGV  seconds after its last use at which an entry expires, then digests
-- Returns {entries, in the order of the digests and false for one that is not there, wrong types}.
local ttl_s = tonumber(ARGV[1])
local digests = {unpack(ARGV, 2)}
local entries, num_found = {}, 0
for index in ipairs(digests) do entries[index] = false end
if open_cache() then
  drop_expired(now - ttl_s)
  entries = redis.call('HMGET', RESULT_CACHE, unpack(digests))
  for index, digest in ipairs(digests) do
    if entries[index] then
      num_found = num_found + 1
      redis.call('ZADD', RESULT_CACHE_USES, now, digest)
    end
  end
  if num_found > 0 then
    for _, key in ipairs({RESULT_CACHE, RESULT_CACHE_USES}) do redis.call('EXPIRE', key, ttl_s) end
  end
end
return {entries, wrong_types}
