-- include: wrong_types.lua
--
-- A worker that can run more jobs than it found waits for a message on its channel:
--
--   <waiting workers>:<queue>   zset: the names of workers that wait for jobs of the queue, by their rank (claim.lua)
--   <wake>:<worker>             channel of one worker. A message is empty, or a list of strings (worker/claims/messages.py)
--
-- Whatever puts jobs on a queue wakes as many of these workers as there are jobs: those that begin a job at once before those
-- that only keep one ahead, and the fastest first. A message can be lost, so every worker also looks at its queues once in a
-- while.

-- True while no jobs of the queue may begin. A pause of inference lets webhooks go on.
local function is_suspended(queue)
  return redis.call('EXISTS', SUSPENDED) == 1 or (queue ~= WEBHOOKS and redis.call('EXISTS', PAUSED) == 1)
end

-- Return a text that holds strings of any bytes: each with its length before it.
local function pack(strings)
  local packed = {}
  for i, text in ipairs(strings) do packed[i] = #text .. ':' .. text end
  return table.concat(packed)
end

local function wake(queue, num_jobs)
  local waiting = WAITING_WORKERS_ .. queue
  while num_jobs > 0 do
    local worker = (try('zset', 'ZPOPMAX', waiting) or {})[1]
    if not worker then return end
    num_jobs = num_jobs - redis.call('PUBLISH', WAKE_ .. worker, '')  -- 0 if it has lost its connection
  end
end

-- Return a number by which workers that wait are ordered. A full one is below 0, the others are not.
local function rank_of(speed, is_full)
  return is_full and -1 / (1 + speed) or speed
end

-- Let a worker of this rank wait for jobs of the queues, or no longer if the rank is false.
local WAITING_S = 60  -- a worker that waits claims much more often than that
local function wait(worker, queues, rank)
  for _, queue in ipairs(queues) do
    local waiting = WAITING_WORKERS_ .. queue
    if not rank then
      try('zset', 'ZREM', waiting, worker)
    elseif try('zset', 'ZADD', waiting, rank, worker) then
      redis.call('EXPIRE', waiting, WAITING_S)
    end
  end
end
