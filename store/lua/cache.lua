-- include: wrong_types.lua
--
-- The result cache: a hash of entries by digest with the bytes of them all, and a sorted set of the digests by their last
-- use. The bytes are a field of the hash, so that they go with it. What a deletion by hand has left half is dropped.

local ENTRY_BYTES = 200  -- about, of an entry in both keys beside its value and its two digests
local MAX_DROPPED = 1000  -- entries that one script drops because they expired

local function cache_bytes(digest, value_length)
  return ENTRY_BYTES + 2 * #digest + value_length
end

-- Return whether both keys can be used.
local function open_cache()
  local num_entries, num_uses = try('hash', 'HLEN', RESULT_CACHE), try('zset', 'ZCARD', RESULT_CACHE_USES)
  if not num_entries or not num_uses then return false end
  local has_bytes = num_entries == 0 or tonumber(redis.call('HGET', RESULT_CACHE, 'bytes'))
  if not has_bytes or math.max(0, num_entries - 1) ~= num_uses then redis.call('DEL', RESULT_CACHE, RESULT_CACHE_USES) end
  return true
end

local function drop_cached(digest)
  local length = redis.call('HSTRLEN', RESULT_CACHE, digest)
  if redis.call('HDEL', RESULT_CACHE, digest) == 1 then
    redis.call('HINCRBY', RESULT_CACHE, 'bytes', -cache_bytes(digest, length))
  end
  redis.call('ZREM', RESULT_CACHE_USES, digest)
end

-- Drop entries whose last use was before a time, unix, s.
local function drop_expired(before)
  local expired = redis.call('ZRANGEBYSCORE', RESULT_CACHE_USES, '-inf', '(' .. before, 'LIMIT', 0, MAX_DROPPED)
  for _, digest in ipairs(expired) do drop_cached(digest) end
end

local function count_cache(name, number)
  if number > 0 then
    try('hash', 'HINCRBY', RESULT_CACHE_COUNTS, name, number)
    try('hash', 'EXPIRE', RESULT_CACHE_COUNTS, 30 * 86400)
  end
end
