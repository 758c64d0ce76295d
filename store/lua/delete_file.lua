-- flags: allow-oom
-- include: ledger.lua
--
-- Delete a file that no batch reads.
--
-- ARGV  id, owner
-- Returns 'absent', 'deleted', or 'read' by a batch that has not ended.
local id, owner = ARGV[1], ARGV[2]
local file = FILE_ .. id
if redis.pcall('HGET', file, F_OWNER) ~= owner then return 'absent' end
for _, field in ipairs(redis.call('HKEYS', file)) do
  if string.sub(field, 1, #READER_) == READER_ then return 'read' end
end
redis.call('UNLINK', file, file .. _PARTS)
remove_size(owner, id)
try('zset', 'ZREM', FILES_OF_ .. owner, id)
return 'deleted'
