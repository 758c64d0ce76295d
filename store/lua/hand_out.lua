-- include: next_job.lua
-- include: speeds.lua
-- include: wake.lua
--
-- Lease jobs that have just been submitted to workers that wait, and send them along with the message that wakes the
-- worker: a lone job is not delayed by the round trip of a claim. If more jobs than workers wait, the workers claim the rest.
--
-- The message holds: 'leased', queue, id, execution, time of the lease, request, then the job's hash. A worker that does not
-- get it finds the lease under its name with one of its next claims.

local MAX_REQUEST_BYTES = 64 * 1024  -- Redis closes the connection of a subscriber for which megabytes wait

-- Lease the next job of the queue to a worker that waits. Return the message, or nil if the worker must claim it.
local function hand_out_one(queue, worker, offer)
  local list, wip = QUEUE_ .. queue, WIP_ .. queue
  local lease_ms, grace_s, id_prefix, num_left = string.match(offer or '', '^(%d+) (%d+) (%w+) (%d+)$')
  if not lease_ms or not is_type(wip, 'zset') then return nil end
  local id, max_concurrency = head(list, 1, 0)
  if not id or max_concurrency then return nil end
  if (try('string', 'STRLEN', REQUEST_ .. id) or 0) > MAX_REQUEST_BYTES then return nil end
  local execution = string.format('%sff%02x', id_prefix, num_left)
  local row = take(1, list, wip, id, execution, worker, lease_ms, grace_s)
  local strings = {'leased', queue, id, execution, row[6], row[5] or ''}
  for _, text in ipairs(row[4]) do strings[#strings + 1] = text end
  num_left = num_left - 1
  return pack(strings), num_left > 0 and table.concat({lease_ms, grace_s, id_prefix, num_left}, ' ')
end

-- Return a function that tells whether a worker should have any of these jobs: not if faster ones end them all before it would
-- end the first.
local function chooser(queue, num_jobs)
  if num_jobs == 1 then return function() return true end end  -- the fastest is asked first
  local time, speed = plan_of('', {queue}, num_jobs + (try('zset', 'ZCARD', WIP_ .. queue) or 0), now)
  return function(worker) return not time or not speed(worker) or time * speed(worker) >= 1 end
end

-- Remove the next worker that waits, or the next full one. Return its name and its rank (see wake.lua).
local function next_waiting(waiting, must_be_full)
  if not must_be_full then return unpack(try('zset', 'ZPOPMAX', waiting) or {}) end
  local worker, rank = unpack(try('zset', 'ZREVRANGEBYSCORE', waiting, '(0', '-inf', 'WITHSCORES', 'LIMIT', 0, 1) or {})
  if worker then redis.call('ZREM', waiting, worker) end
  return worker, rank
end

-- Wake as many workers as there are new jobs, each with a job if possible.
local function hand_out(queue, num_jobs)
  if is_suspended(queue) then return wake(queue, num_jobs) end
  local list, waiting = QUEUE_ .. queue, WAITING_WORKERS_ .. queue
  if try('zset', 'ZCARD', waiting) == 0 then return end
  local should_have, wait_on, must_be_full = chooser(queue, num_jobs), {}, false
  while num_jobs > 0 do
    local worker, rank = next_waiting(waiting, must_be_full)
    if not worker then break end
    local channel, key = WAKE_ .. worker, WORKER_ .. worker
    if not should_have(worker) then
      wait(worker, {queue}, rank)
      if tonumber(rank) < 0 then break end  -- the others are no faster
      must_be_full = true
    elseif redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then  -- it has not lost its connection
      local message, offer = hand_out_one(queue, worker, try('hash', 'HGET', key, 'waits_with'))
      redis.call('PUBLISH', channel, message or '')
      num_jobs = num_jobs - 1
      if offer then
        redis.call('HSET', key, 'waits_with', offer)
        wait_on[#wait_on + 1] = {worker, rank}
      elseif message then
        redis.call('HDEL', key, 'waits_with')  -- it may wait for jobs of other queues, too
      end
    end
  end
  for _, one in ipairs(wait_on) do
    if redis.call('LLEN', list) == 0 then
      wait(one[1], {queue}, one[2])
    else
      redis.call('PUBLISH', WAKE_ .. one[1], '')  -- it claims more jobs
    end
  end
end
