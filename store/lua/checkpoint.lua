-- include: is_held.lua
-- include: wrong_types.lua
--
-- The checkpoint of a job that runs: a hash of chunks of finished rows (wire.CheckpointRow) by their numbers from 0, with
-- `identity`, which says what model computed them, and `bytes`, the sum of the chunks. Only the worker that holds the
-- job's lease reads and writes it. end_job.lua deletes it with the end of the job.

local lease_key, identity, number = ARGV[1], ARGV[2], ARGV[3]
local id = string.match(lease_key, '^(.*):')
local job, checkpoint = JOB_ .. id, CHECKPOINT_ .. id
local is_lost = not is_held(KEYS[1], lease_key) or redis.pcall('HEXISTS', job, F_DATA) ~= 1

local function count_rows(name, num_rows)
  if num_rows > 0 then
    try('hash', 'HINCRBY', CHECKPOINT_COUNTS, name, num_rows)
    try('hash', 'EXPIRE', CHECKPOINT_COUNTS, 30 * 86400)
  end
end

-- Drop a checkpoint whose rows another model computed, or that is of a wrong type. Return whether there is one now.
local function open_checkpoint()
  local found = redis.pcall('HGET', checkpoint, 'identity')
  if found == identity then return true end
  if found then
    redis.call('DEL', checkpoint)
    count_rows('dropped', tonumber(redis.call('HGET', job, F_CHECKPOINT) or '') or 0)
    redis.call('HDEL', job, F_CHECKPOINT)
  end
  return false
end
