-- flags: allow-oom
-- include: ledger.lua
--
-- Delete the record of a batch that has ended. Its files are deleted before.
--
-- ARGV  id, owner
local id, owner = ARGV[1], ARGV[2]
local batch = BATCH_ .. id
if redis.pcall('HGET', batch, F_OWNER) ~= owner then return end
redis.call('UNLINK', batch)
remove_size(owner, id)
try('zset', 'ZREM', BATCHES_OF_ .. owner, id)
