-- Read a job, and its outcome if that is small, at one moment. Another owner's job and an absent one get the same answer at
-- the same cost, because nothing beside the owner is read of them.
--
-- KEYS  the job's hash, its outcome
-- ARGV  owner, the most bytes of an outcome to read, the fields to read
-- Returns the time (seconds and microseconds); if the job is the owner's also the values of these fields, the bytes of the
-- outcome, and the outcome; false instead of one that is absent or larger.
local time = redis.call('TIME')
local now = {tonumber(time[1]), tonumber(time[2])}
if redis.pcall('HGET', KEYS[1], F_OWNER) ~= ARGV[1] then return {now} end
local num_bytes, outcome = redis.pcall('STRLEN', KEYS[2]), false
if type(num_bytes) ~= 'number' then  -- the key is no string
  num_bytes = 0
elseif num_bytes <= tonumber(ARGV[2]) then
  outcome = redis.call('GET', KEYS[2])
end
return {now, redis.call('HMGET', KEYS[1], unpack(ARGV, 3)), num_bytes, outcome}
