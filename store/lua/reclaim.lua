-- include: lease.lua
--
-- Put the jobs of dead workers back at the front of their queues. No Retry is used up.
--
-- Any of the jobs that a worker had in flight may have caused its death. Next time, each runs among half as many jobs
-- (its max_concurrency, the field `company`). Only the death of a worker that ran one job alone counts against that job
-- (`crashes`). A job with `crash_limit` crashes, or that its owner canceled, is leased to the caller, which ends it.
--
-- KEYS  list and wip registry of each queue
-- ARGV  crash_limit, claim id, '1': the answer of an earlier call of this id was lost, then worker, lease_ms, grace_s
-- Returns {number of jobs put back, rows (see lease.lua) of jobs to end, keys of a wrong type}.
local crash_limit, claim_id, is_repeated = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1'
local worker, lease_ms, grace_s = ARGV[4], ARGV[5], ARGV[6]
local num_back, rows = 0, {}

if is_repeated then rows = leased_under(claim_id, #KEYS / 2, worker, lease_ms, grace_s) end
local num_repeated = #rows

-- Find the expired leases, and count the jobs of each worker. Leases of a dead worker that expire later count too.
local expired, in_flight = {}, {}
for index = 1, #KEYS / 2 do
  local is_usable = is_type(KEYS[2 * index - 1], 'list')
  for _, lease_key in ipairs(is_usable and try('zset', 'ZRANGE', KEYS[2 * index], 0, -1) or {}) do
    local id, execution = string.match(lease_key, '^(.*):(.*)$')
    local holder = id and redis.pcall('HGET', JOB_ .. id, F_WORKER_NAME) or ''
    if type(holder) ~= 'string' then holder = '' end  -- the job is no hash, or has no worker
    in_flight[holder] = (in_flight[holder] or 0) + 1
    local ttl_ms = redis.call('PTTL', EXECUTION_ .. lease_key)
    if ttl_ms == -2 then  -- absent
      expired[#expired + 1] = {index = index, lease_key = lease_key, id = id, execution = execution, holder = holder}
    elseif ttl_ms == -1 then  -- another client wrote the key: let the lease end, unless its worker extends it
      redis.call('PEXPIRE', EXECUTION_ .. lease_key, lease_ms)
    end
  end
end

-- Count a death of its worker against a job; return its crashes, 0 if other jobs ran beside it.
local function count_death(job, num_in_flight)
  local max_concurrency = tonumber(redis.call('HGET', job, F_MAX_CONCURRENCY) or '')
  if max_concurrency == 1 then
    local crashes = math.min(tonumber(redis.call('HGET', job, F_CRASHES) or '') or 0, crash_limit) + 1
    redis.call('HSET', job, F_CRASHES, crashes)
    return crashes
  end
  local shared = math.min(max_concurrency or num_in_flight, num_in_flight)
  redis.call('HSET', job, F_MAX_CONCURRENCY, math.max(1, math.floor(shared / 2)))
  return 0
end

local iso = iso_time(now)
for _, found in ipairs(expired) do
  local list, wip = KEYS[2 * found.index - 1], KEYS[2 * found.index]
  redis.call('ZREM', wip, found.lease_key)
  local id, job = found.id, JOB_ .. (found.id or '')
  if id and redis.pcall('HEXISTS', job, F_DATA) == 1 then
    try('zset', 'ZREM', EXECUTIONS_ .. id, found.execution)
    local crashes = count_death(job, in_flight[found.holder])
    if crashes >= crash_limit or redis.call('HGET', job, F_CANCEL_REQUESTED) == '1' then
      local execution = string.format('%s%08x', claim_id, #rows - num_repeated)
      rows[#rows + 1] = lease(found.index, id, execution, wip, worker, lease_ms, grace_s)
    else
      redis.call('HSET', job, F_STATUS, 'queued', F_STARTED_AT, '', F_WORKER_NAME, '', F_ENQUEUED_AT, iso)
      redis.call('LPUSH', list, id)
      num_back = num_back + 1
    end
  end
end
return {num_back, rows, wrong_types}
