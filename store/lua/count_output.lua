-- flags: allow-oom
-- include: clock.lua
-- include: ledger.lua
--
-- Count a chunk of the output of a batch that is counted. Like results, it is written beyond any limit.
--
-- ARGV  owner, id of the batch, id of the file, bytes
local owner, batch, file, num_bytes = unpack(ARGV)
if read_size(owner, batch) > 0 then write_size(owner, file, read_size(owner, file) + num_bytes, later(now)) end
