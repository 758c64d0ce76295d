-- include: wrong_types.lua
--
-- True if the end of a lease's job was recorded under the lease: an earlier call did so, and its answer was lost.
local function is_recorded(id, lease_key)
  if redis.pcall('HGET', JOB_ .. id, F_STATUS) ~= 'finished' then return false end
  local execution = string.sub(lease_key, #id + 2)
  local last = try('stream', 'XREVRANGE', RESULTS_ .. id, '+', '-', 'COUNT', 1)
  for _, value in ipairs(last and last[1] and last[1][2] or {}) do
    if value == execution then return true end
  end
  return false
end
