-- flags: allow-oom
-- include: end_job.lua
-- include: is_held.lua
-- include: is_recorded.lua
--
-- End jobs that succeeded and that no other job waits for, many in one step. The script leaves the same keys as RQ's own
-- methods, which end all other jobs (worker/rq/commit.py), at a tenth of their cost.
--
-- All or nothing: what an end cannot do without (the lease and the job's hash) is checked before the first write, and the
-- outcome replaces a key of any type. Bookkeeping in a key of a wrong type is left out (wrong_types.lua).
--
-- KEYS  wip registry of each job
-- ARGV  key of the worker, state of the idle worker, current job or ''; then for each job: see
--       worker/rq/success_writer.py
-- Returns {answers, keys of a wrong type}; for each job
--   'recorded'    also if an earlier call recorded it and its answer was lost
--   'lost'        its worker lost the lease
--   'awaited'     another job depends on it, and nothing was written
--   'incomplete'  the bytes of its outcome before those of this call are not there, and nothing was written
local worker, state, current_job = unpack(ARGV, 1, 3)
local at = 4

-- Return the next `count` arguments. Without `count`, the next argument is the count.
local function read_args(count)
  if not count then
    count, at = tonumber(ARGV[at]), at + 1
  end
  at = at + count
  return unpack(ARGV, at - count, at - 1)
end

-- End a job. `outcome` is what follows on the first `num_uploaded` bytes, which upload_part.lua has stored.
local function finish(wip, lease_key, num_uploaded, outcome, ttl_s, fields, result)
  local id = string.match(lease_key, '^(.*):')
  local job, results, upload = JOB_ .. id, RESULTS_ .. id, OUTCOME_UPLOAD_ .. lease_key
  if not is_held(wip, lease_key) or redis.pcall('HEXISTS', job, F_DATA) ~= 1 then
    redis.call('DEL', upload)
    return is_recorded(id, lease_key) and 'repeated' or 'lost'
  end
  if (try('set', 'SCARD', job .. _DEPENDENTS) or 0) > 0 then return 'awaited' end
  if num_uploaded > 0 then
    local uploaded = redis.pcall('GETRANGE', upload, 0, num_uploaded - 1)
    if type(uploaded) ~= 'string' or #uploaded < num_uploaded then return 'incomplete' end
    outcome = uploaded .. outcome
  end

  if try('stream', 'XADD', results, 'MAXLEN', '~', 10, '*', unpack(result)) then redis.call('EXPIRE', results, ttl_s) end
  end_job(id, string.sub(wip, #WIP_ + 1), 'finished', fields, outcome ~= '' and outcome or nil, ttl_s)
  try('zset', 'ZADD', STORED_RESULTS, 'XX', 'LT', now_s + ttl_s + 1, lease_key)  -- an object goes with its outcome
  redis.call('DEL', EXECUTION_ .. lease_key, EXECUTIONS_ .. id, upload)
  try('zset', 'ZREM', wip, lease_key)  -- last, because a job whose end an error cuts short must keep its lease
  return 'recorded'
end

local answers, num_recorded, worked_s = {}, 0, 0
for i, wip in ipairs(KEYS) do
  local lease_key, num_uploaded, outcome, ttl_s, ran_s = read_args(5)
  local fields, result = {read_args()}, {read_args()}
  answers[i] = finish(wip, lease_key, tonumber(num_uploaded), outcome, tonumber(ttl_s), fields, result)
  if answers[i] == 'recorded' then
    num_recorded, worked_s = num_recorded + 1, worked_s + ran_s
  elseif answers[i] == 'repeated' then
    answers[i] = 'recorded'
  end
end

if redis.call('EXISTS', worker) == 1 then  -- else it has expired, and would be left over if the worker were dead by now
  try('hash', 'HINCRBY', worker, 'successful_job_count', num_recorded)
  try('hash', 'HINCRBYFLOAT', worker, 'total_working_time', string.format('%.6f', worked_s))
  try('hash', 'HSET', worker, unpack(current_job == '' and {'state', state} or {'current_job', current_job}))
  if current_job == '' then try('hash', 'HDEL', worker, 'current_job') end
end
return {answers, wrong_types}
