-- Read hashes that belong to an owner. Another owner's hash and an absent one get the same answer at the same cost, because
-- nothing beside the owner is read of them.
--
-- KEYS  hashes with the field `owner`
-- ARGV  owner, then the fields to read
-- Returns for each hash the values of these fields; false if it is not the owner's.
local rows = {}
for i, key in ipairs(KEYS) do
  rows[i] = redis.pcall('HGET', key, F_OWNER) == ARGV[1] and redis.call('HMGET', key, unpack(ARGV, 2))
end
return rows
