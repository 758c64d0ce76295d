-- include: next_job.lua
-- include: wake.lua
--
-- Lease jobs that have just been submitted to workers that wait, and send them along with the message that wakes the
-- worker: a lone job is not delayed by the round trip of a claim. Each worker gets one. The claim that follows brings it more.
--
-- The message holds: 'leased', queue, id, execution, time of the lease, request, then the job's hash. A worker that does not get it finds the lease under its name with one of its next claims.

local MAX_REQUEST_BYTES = 64 * 1024  -- Redis closes the connection of a subscriber for which megabytes wait

-- Lease the next job of the queue to a worker that waits. Return the message, or nil if the worker must claim it.
local function hand_out_one(queue, worker)
  local list, wip = QUEUE_ .. queue, WIP_ .. queue
  local lease_ms, grace_s, session, number =
    string.match(try('hash', 'HGET', WORKER_ .. worker, 'waits_with') or '', '^(%d+) (%d+) (%w+) (%d+)$')
  if not lease_ms or not is_type(wip, 'zset') then return nil end
  local id, max_concurrency = head(list, 1)
  if not id or max_concurrency then return nil end
  if redis.call('STRLEN', REQUEST_ .. id) > MAX_REQUEST_BYTES then return nil end
  local execution = string.format('%s%08x%s', session, number, 'ffff')
  local row = take(1, list, wip, id, execution, worker, lease_ms, grace_s)
  local strings = {'leased', queue, id, execution, row[6], row[5] or ''}
  for _, text in ipairs(row[4]) do strings[#strings + 1] = text end
  return pack(strings)
end

local function hand_out(queue, num_jobs)
  local waiting = WAITING_WORKERS_ .. queue
  while num_jobs > 0 do
    local worker = (try('zset', 'ZPOPMAX', waiting) or {})[1]
    if not worker then return end
    local channel = WAKE_ .. worker
    if redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then  -- it has not lost its connection
      local is_suspended = redis.call('EXISTS', SUSPENDED) == 1
      redis.call('PUBLISH', channel, not is_suspended and hand_out_one(queue, worker) or '')
      num_jobs = num_jobs - 1
    end
  end
end
