-- Take jobs off the queues and lease them, with their requests, in one step: there is no moment at which a job that left
-- its queue is in no registry.
--
-- KEYS  rq:queue:<queue>, rq:wip:<queue> of each queue, the first to be drained first
-- ARGV  see worker/rq/leases.py
-- Returns rows (see lease.lua), or false while `rq suspend` holds.
local room, in_flight, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local round_robin, worker_key, executions = ARGV[4] == '1', ARGV[5], ARGV[6]
local batch = tonumber(ARGV[7])
local worker, lease_ms, iso, grace_s = ARGV[8], ARGV[9], ARGV[10], ARGV[11]

if redis.call('EXISTS', 'rq:suspended') == 1 then return false end

local rows, num_bytes = {}, 0
local max_bytes = 64 * 1024 * 1024  -- of requests in one reply; the next claim takes what is left

-- The id at the head of the queue whose job still exists, and the company that it may have (see reclaim.lua); ids of jobs
-- that expired or were deleted are dropped.
local function head(queue)
  while true do
    local id = redis.call('LINDEX', queue, 0)
    if not id then
      top_up(queue, batch)
      id = redis.call('LINDEX', queue, 0)
      if not id then return nil end
    end
    if string.match(id, '^[%w_-]+$') then
      local known = redis.pcall('HMGET', 'rq:job:' .. id, 'data', 'company')  -- an error where it is no hash: nobody's job
      if known[1] then return id, tonumber(known[2] or '') end
    end
    redis.call('LPOP', queue)
  end
end

-- 'taken', 'empty', or 'alone': the next job may not join those in flight, so claiming stops until they are fewer.
local function take(index)
  local queue, wip = KEYS[2 * index - 1], KEYS[2 * index]
  local id, company = head(queue)
  if not id then return 'empty' end
  local allowed = math.min(limit, math.max(1, company or limit))
  if in_flight + 1 > allowed then return 'alone' end
  limit = allowed
  in_flight = in_flight + 1
  redis.call('LPOP', queue)
  redis.call('DEL', 'scorepool:outcome:' .. id)  -- of an earlier run, when the job was queued again by hand
  local row = lease(index, id, string.format('%s%08x', executions, #rows), wip, worker, lease_ms, iso, grace_s)
  rows[#rows + 1] = row
  num_bytes = num_bytes + #(row[5] or '')
  return 'taken'
end

local index, num_empty, num_queues = 1, 0, #KEYS / 2
while #rows < room and num_bytes < max_bytes and num_empty < num_queues do
  local found = take(index)
  if found == 'alone' then break end
  if found == 'empty' then num_empty = num_empty + 1 else num_empty = 0 end
  if round_robin or found == 'empty' then index = index % num_queues + 1 end
end

for i = 1, num_queues do
  top_up(KEYS[2 * i - 1], batch)
end

if #rows > 0 then
  redis.call('HSET', worker_key, 'state', 'busy', 'current_job', rows[#rows][2])
end
return rows
