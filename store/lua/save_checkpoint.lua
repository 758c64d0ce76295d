-- include: checkpoint.lua
-- include: ledger.lua
-- include: memory.lua
--
-- Keep a chunk of finished rows of a job.
--
-- A chunk may be sent again, also with more rows. Chunks of another model's rows make room for the first of this one's.
-- A job that gets further than ever is not what kills its workers: its crashes are counted from here. Rows that another
-- model's worker has dropped are no progress when they are computed again.
--
-- KEYS  wip registry of the job
-- ARGV  key of the lease, identity of the model, number of the chunk, the chunk, most bytes of all chunks, seconds for which
--       they are kept, new rows in the chunk, rows in all chunks
-- Returns 'saved', or why nothing was written:
--   'lost'     the lease is over
--   'full'     there is no room in the job's bytes, or in those for which its owner's account has the job
--   'refused'  Redis has too little memory
--   'gone'     the chunks before this one are not there
if is_lost then return 'lost' end
local chunk, max_bytes, ttl_s, num_new, num_rows = unpack(ARGV, 4, 8)
if exceeds_memory(MEMORY_FOR_NEW) then return 'refused' end
if not open_checkpoint() and number ~= '0' then return 'gone' end
local before = redis.call('HSTRLEN', checkpoint, number)
local num_bytes = (tonumber(redis.call('HGET', checkpoint, 'bytes') or '') or 0) + #chunk - before
local admitted_bytes = read_size(redis.call('HGET', job, F_OWNER) or '', id)
local request_bytes = try('string', 'STRLEN', REQUEST_ .. id) or 0
if num_bytes > tonumber(max_bytes) then return 'full' end
if admitted_bytes > 0 and JOB_BYTES + request_bytes + num_bytes > admitted_bytes then return 'full' end
redis.call('HSET', checkpoint, 'identity', identity, 'bytes', num_bytes, number, chunk)
redis.call('EXPIRE', checkpoint, ttl_s)
redis.call('HSET', job, F_CHECKPOINT, num_rows)
if tonumber(num_rows) > (tonumber(redis.call('HGET', job, F_FURTHEST) or '') or 0) then
  redis.call('HSET', job, F_FURTHEST, num_rows)
  redis.call('HDEL', job, F_CRASHES)
end
count_rows('saved', tonumber(num_new))
return 'saved'
