-- flags: allow-oom
-- include: wrong_types.lua
-- include: is_held.lua
-- include: stored_result.lua
--
-- Find objects of the result store that no job needs: their job has expired, was deleted, or is another worker's. An object
-- is needed while the job's outcome names its execution, and while the lease is held under which it was written, because
-- only its holder can end the job. Once neither is so, it never is again.
--
-- ARGV  the most objects to check, seconds until a needed one is checked again, seconds until one to delete is found again
-- Returns the keys of the leases of those to delete.
local most, again_s, retry_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now_s = tonumber(redis.call('TIME')[1])

local function is_needed(id, execution, lease_key)
  if stored_execution(id) == execution then return true end
  local queue = redis.pcall('HGET', JOB_ .. id, F_ORIGIN)
  local held = type(queue) == 'string' and is_held(WIP_ .. queue, lease_key)
  return held and held ~= nil
end

local dead = {}
for _, lease_key in ipairs(try('zset', 'ZRANGEBYSCORE', STORED_RESULTS, '-inf', now_s, 'LIMIT', 0, most) or {}) do
  local id, execution = string.match(lease_key, '^([%w_-]+):([%w_-]+)$')
  if not id then
    redis.call('ZREM', STORED_RESULTS, lease_key)
  elseif is_needed(id, execution, lease_key) then
    local ttl_s = redis.call('TTL', OUTCOME_ .. id)
    redis.call('ZADD', STORED_RESULTS, now_s + (ttl_s >= 0 and math.min(ttl_s + 1, again_s) or again_s), lease_key)
  else
    redis.call('ZADD', STORED_RESULTS, now_s + retry_s, lease_key)
    dead[#dead + 1] = lease_key
  end
end
return dead
