-- flags: allow-oom
-- include: is_held.lua
-- include: is_recorded.lua
--
-- Store a part of an outcome that is too large for one message. finish.lua puts it in front of the rest.
--
-- A part may be sent again: it has the same bytes. A part that does not follow on what is stored is not written, because
-- Redis may have lost the parts before it.
--
-- KEYS  wip registry of the job
-- ARGV  key of the lease, offset of the part, the part, seconds for which an upload that stands still is kept
-- Returns how many bytes are stored, from which the worker goes on; or, if the lease is over, so that nothing is kept,
-- 'recorded' (see is_recorded.lua) or 'lost'.
local lease_key, offset, part, kept_s = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local upload = OUTCOME_UPLOAD_ .. lease_key
if not is_held(KEYS[1], lease_key) then
  redis.call('DEL', upload)
  return is_recorded(string.match(lease_key, '^(.*):'), lease_key) and 'recorded' or 'lost'
end
local stored = redis.pcall('STRLEN', upload)
if type(stored) ~= 'number' then  -- a key of a wrong type
  redis.call('DEL', upload)
  stored = 0
end
if offset > stored then return stored end
redis.call('SETRANGE', upload, offset, part)
redis.call('EXPIRE', upload, kept_s)
return redis.call('STRLEN', upload)
