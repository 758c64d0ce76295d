-- include: expiry.lua
--
-- True if a lease is in its registry and its worker may still end the job. A worker that is late may, unless the job
-- has expired with the lease (expiry.lua): clients have read that it failed. If the registry is no zset: true if the
-- lease lives.
local function is_held(wip, lease_key)
  local score = redis.pcall('ZSCORE', wip, lease_key)
  if not score then return false end
  if redis.call('EXISTS', EXECUTION_ .. lease_key) == 1 then return true end
  local job = JOB_ .. string.match(lease_key, '^(.*):')
  return type(score) ~= 'table' and not is_past(redis.pcall('HGET', job, F_EXPIRES_AT))
end
