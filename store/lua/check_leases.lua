-- include: is_held.lua
--
-- KEYS  wip registry of each lease
-- ARGV  the key of each lease, <job>:<execution>
-- Returns for each lease whether its worker holds it and the job still exists, and how many other jobs depend on it.
local answers = {}
for i, lease_key in ipairs(ARGV) do
  local job = JOB_ .. string.match(lease_key, '^(.*):')
  local is_ours = is_held(KEYS[i], lease_key) and redis.pcall('HEXISTS', job, F_DATA) == 1
  answers[i] = {is_ours and 1 or 0, try('set', 'SCARD', job .. _DEPENDENTS) or 0}
end
return answers
