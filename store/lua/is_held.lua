-- True if a lease is in its registry. If the registry is no zset: true if the lease has not expired.
local function is_held(wip, lease_key)
  local score = redis.pcall('ZSCORE', wip, lease_key)
  if type(score) ~= 'table' then return score end
  return redis.call('EXISTS', EXECUTION_ .. lease_key) == 1
end
