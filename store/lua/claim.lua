-- include: lease.lua
-- include: backlog.lua
--
-- Take jobs off the queues and lease them, in one step, so that a job is always in the list or in the registry.
--
-- KEYS  list and wip registry of each queue, the first to be drained first
-- ARGV  max_jobs, jobs in flight, max_in_flight, '1': round robin, key of the worker, claim id, '1': the answer of an
--       earlier claim of this id was lost, list length, then worker, lease_ms, grace_s
-- Returns {rows (see lease.lua), keys of a wrong type}, or false while `rq suspend` holds. A queue with a key of a wrong
-- type is left alone.
local max_jobs, in_flight, max_in_flight = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local round_robin, worker_key, claim_id, is_repeated = ARGV[4] == '1', ARGV[5], ARGV[6], ARGV[7] == '1'
local list_length = tonumber(ARGV[8])
local worker, lease_ms, grace_s = ARGV[9], ARGV[10], ARGV[11]
local num_queues = #KEYS / 2

if is_repeated then
  local rows = leased_under(claim_id, num_queues, worker, lease_ms, grace_s)
  if #rows > 0 then return {rows, wrong_types} end
end
if redis.call('EXISTS', SUSPENDED) == 1 then return false end

local rows, num_bytes = {}, 0
local max_bytes = 64 * 1024 * 1024  -- of requests in one reply; the next claim takes what is left

local is_usable = {}
for index = 1, num_queues do
  local list, wip = KEYS[2 * index - 1], KEYS[2 * index]
  is_usable[index] = is_type(list, 'list') and is_type(wip, 'zset') and can_top_up(list)
end

-- Return the id at the head of the queue whose job still exists, and the job's max_concurrency (see reclaim.lua). Ids of
-- jobs that expired or were deleted are dropped.
local function head(list)
  while true do
    local id = redis.call('LINDEX', list, 0)
    if not id then
      top_up(list, list_length)
      id = redis.call('LINDEX', list, 0)
      if not id then return nil end
    end
    if string.match(id, '^[%w_-]+$') then
      local known = redis.pcall('HMGET', JOB_ .. id, F_DATA, F_MAX_CONCURRENCY)  -- an error if the key is no hash: then there is no job
      if known[1] then return id, tonumber(known[2] or '') end
    end
    redis.call('LPOP', list)
  end
end

-- Lease the next job of a queue. Return 'leased'; 'empty'; or 'full': the next job may not join those in flight.
local function lease_next(index)
  if not is_usable[index] then return 'empty' end
  local list, wip = KEYS[2 * index - 1], KEYS[2 * index]
  local id, max_concurrency = head(list)
  if not id then return 'empty' end
  local allowed = math.min(max_in_flight, math.max(1, max_concurrency or max_in_flight))
  if in_flight + 1 > allowed then return 'full' end
  max_in_flight = allowed
  in_flight = in_flight + 1
  redis.call('LPOP', list)
  redis.call('DEL', OUTCOME_ .. id)  -- of an earlier run, when the job was queued again by hand
  local row = lease(index, id, string.format('%s%08x', claim_id, #rows), wip, worker, lease_ms, grace_s)
  rows[#rows + 1] = row
  num_bytes = num_bytes + #(row[5] or '')
  return 'leased'
end

local index, num_empty = 1, 0
while #rows < max_jobs and num_bytes < max_bytes and num_empty < num_queues do
  local found = lease_next(index)
  if found == 'full' then break end
  if found == 'empty' then num_empty = num_empty + 1 else num_empty = 0 end
  if round_robin or found == 'empty' then index = index % num_queues + 1 end
end

for i = 1, num_queues do
  if is_usable[i] then top_up(KEYS[2 * i - 1], list_length) end
end

if #rows > 0 then
  try('hash', 'HSET', worker_key, 'state', 'busy', 'current_job', rows[#rows][2])
end
return {rows, wrong_types}
