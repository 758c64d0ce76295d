-- include: checkpoint.lua
--
-- Read a chunk of the finished rows of a job.
--
-- KEYS  wip registry of the job
-- ARGV  key of the lease, identity of the model, number of the chunk, rows that the reader took from the chunk before
-- Returns the chunk; false if there is none, or if the lease is over.
local MAX_CHUNK_BYTES = 4 * 1024 * 1024  -- no worker writes a larger one
if is_lost then return false end
count_rows('restored', tonumber(ARGV[4]))
if not open_checkpoint() then return false end
if redis.call('HSTRLEN', checkpoint, number) > MAX_CHUNK_BYTES then return false end
return redis.call('HGET', checkpoint, number)
