-- Take jobs back from workers that are gone: to the front of their queue, no Retry spent.
--
-- Any job that was in flight at the death may have caused it. So each may next be in flight with half as many (`company`),
-- and only the death of a worker that one job had to itself counts against that job (`crashes`): it had no company to
-- blame. A job with too many crashes, or that its owner canceled, is leased to the caller instead, who ends it.
--
-- KEYS  rq:queue:<queue>, rq:wip:<queue> of each queue
-- ARGV  see worker/rq/leases.py
-- Returns {number of jobs put back, rows (see lease.lua) of jobs to end}.
local crash_limit, executions = tonumber(ARGV[1]), ARGV[2]
local worker, lease_ms, iso, grace_s = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local num_back, rows = 0, {}

-- Leases that are over, and how many jobs each worker had. Leases of one worker end at different times: all of them count.
local over, in_flight = {}, {}
for index = 1, #KEYS / 2 do
  for _, member in ipairs(redis.call('ZRANGE', KEYS[2 * index], 0, -1)) do
    local id, execution = string.match(member, '^(.*):(.*)$')
    local holder = id and redis.pcall('HGET', 'rq:job:' .. id, 'worker_name') or ''
    if type(holder) ~= 'string' then holder = '' end  -- the job is no hash, or has no worker
    in_flight[holder] = (in_flight[holder] or 0) + 1
    if redis.call('EXISTS', 'rq:execution:' .. member) == 0 then
      over[#over + 1] = {index = index, member = member, id = id, execution = execution, holder = holder}
    end
  end
end

local function suspect(job, num_in_flight)
  local company = tonumber(redis.call('HGET', job, 'company') or '')
  if company == 1 then
    local crashes = math.min(tonumber(redis.call('HGET', job, 'crashes') or '') or 0, crash_limit) + 1
    redis.call('HSET', job, 'crashes', crashes)
    return crashes
  end
  local shared = math.min(company or num_in_flight, num_in_flight)
  redis.call('HSET', job, 'company', math.max(1, math.floor(shared / 2)))
  return 0
end

for _, lost in ipairs(over) do
  local queue, wip = KEYS[2 * lost.index - 1], KEYS[2 * lost.index]
  redis.call('ZREM', wip, lost.member)
  local id, job = lost.id, 'rq:job:' .. (lost.id or '')
  if id and redis.pcall('HEXISTS', job, 'data') == 1 then
    redis.call('ZREM', 'rq:executions:' .. id, lost.execution)
    local crashes = suspect(job, in_flight[lost.holder])
    if crashes >= crash_limit or redis.call('HGET', job, 'cancel_requested') == '1' then
      rows[#rows + 1] =
        lease(lost.index, id, string.format('%s%08x', executions, #rows), wip, worker, lease_ms, iso, grace_s)
    else
      redis.call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '', 'enqueued_at', iso)
      redis.call('LPUSH', queue, id)
      num_back = num_back + 1
    end
  end
end
return {num_back, rows}
