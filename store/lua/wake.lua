-- include: wrong_types.lua
--
-- A worker that can run more jobs than it found waits for a message on its channel:
--
--   <waiting workers>:<queue>   zset: the names of workers that wait for jobs of the queue, by their speed (claim.lua)
--   <wake>:<worker>             channel of one worker
--
-- Whatever puts jobs on a queue wakes as many of these workers as there are jobs, the fastest first. A message can be lost,
-- so every worker also looks at its queues once in a while.

local function wake(queue, num_jobs)
  local waiting = WAITING_WORKERS_ .. queue
  while num_jobs > 0 do
    local worker = (try('zset', 'ZPOPMAX', waiting) or {})[1]
    if not worker then return end
    num_jobs = num_jobs - redis.call('PUBLISH', WAKE_ .. worker, '')  -- 0 if it has lost its connection
  end
end
