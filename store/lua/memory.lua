-- How much of `maxmemory` is in use. Redis refuses commands that need memory only when all of it is, also those that end
-- jobs and report that workers live. So new jobs are refused before (submit.lua), then no job begins (claim.lua), and the
-- rest is left for the results of jobs in flight. Scripts that end, put back or delete jobs run beyond maxmemory too: the
-- directive `-- flags: allow-oom`, see scripts.py.

-- Return whether more than `percent` of maxmemory is in use, and maxmemory: 0 if there is no limit.
local function exceeds_memory(percent)
  local info = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(info, '\nmaxmemory:(%d+)') or '0')
  return limit > 0 and tonumber(string.match(info, '\nused_memory:(%d+)')) * 100 > limit * percent, limit
end
