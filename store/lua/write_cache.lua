-- include: cache.lua
-- include: clock.lua
-- include: memory.lua
--
-- Write entries of the result cache, and drop those that were not used for longest until it has room.
--
-- ARGV  most bytes, seconds after its last use at which an entry expires, hits, misses and shared ones to count, then
--       digest and entry for each
-- Returns {number written, wrong types}: none while Redis has no memory for new jobs.
local max_bytes, ttl_s = tonumber(ARGV[1]), tonumber(ARGV[2])
for index, name in ipairs({'hits', 'misses', 'shared'}) do count_cache(name, tonumber(ARGV[2 + index])) end
local num_entries = (#ARGV - 5) / 2
if num_entries == 0 or not open_cache() then return {0, wrong_types} end
if exceeds_memory(MEMORY_FOR_NEW) then
  count_cache('refused', num_entries)
  return {0, wrong_types}
end
drop_expired(now - ttl_s)
local num_bytes = 0
for index = 6, #ARGV, 2 do
  local digest, entry = ARGV[index], ARGV[index + 1]
  if redis.call('HEXISTS', RESULT_CACHE, digest) == 1 then drop_cached(digest) end
  redis.call('HSET', RESULT_CACHE, digest, entry)
  redis.call('ZADD', RESULT_CACHE_USES, now, digest)
  num_bytes = num_bytes + cache_bytes(digest, #entry)
end
redis.call('HINCRBY', RESULT_CACHE, 'bytes', num_bytes)
local num_evicted = 0
while tonumber(redis.call('HGET', RESULT_CACHE, 'bytes')) > max_bytes do
  local oldest = redis.call('ZRANGE', RESULT_CACHE_USES, 0, 0)[1]
  if not oldest then break end
  drop_cached(oldest)
  num_evicted = num_evicted + 1
end
count_cache('evictions', num_evicted)
for _, key in ipairs({RESULT_CACHE, RESULT_CACHE_USES}) do redis.call('EXPIRE', key, ttl_s) end
return {num_entries, wrong_types}
