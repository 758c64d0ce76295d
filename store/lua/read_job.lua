-- include: expiry.lua
--
-- Read a job, and its outcome if that is small, at one moment. Another owner's job and an absent one get the same
-- answer at the same cost, because nothing beside the owner is read of them.
--
-- ARGV  id, owner, the most bytes of an outcome to read, the fields to read
-- Returns the time (seconds and microseconds); if the job is the owner's also the values of these fields, the seconds
-- until it expires (see expiry.lua), the bytes of the outcome, and the outcome; false instead of one that is absent or
-- larger.
local id, owner, max_bytes = unpack(ARGV, 1, 3)
local job, outcome_key = JOB_ .. id, OUTCOME_ .. id
local read_at = {tonumber(time[1]), tonumber(time[2])}
if redis.pcall('HGET', job, F_OWNER) ~= owner then return {read_at} end
local num_bytes, outcome = redis.pcall('STRLEN', outcome_key), false
if type(num_bytes) ~= 'number' then  -- the key is no string
  num_bytes = 0
elseif num_bytes <= tonumber(max_bytes) then
  outcome = redis.call('GET', outcome_key)
end
local known = redis.call('HMGET', job, F_STATUS, F_EXPIRES_AT, unpack(ARGV, 4))
local left_s = expires_in_s(id, known[1], known[2])
return {read_at, {unpack(known, 3)}, tostring(left_s), num_bytes, outcome}
