-- include: expiry.lua
--
-- Find jobs in a slice of an owner's list, newest first, so that jobs that no filter lets through cost no transfer.
--
-- KEYS  the list
-- ARGV  the time before which, and from which on, jobs were created (as ZRANGEBYSCORE takes them), the most jobs to look at,
--       the most to return, the model and the kind they must have ('' for any), the status of RQ's that they must not have,
--       between commas; '1' to let pass those which have failed though RQ has another status: finished without an
--       outcome, or expired (see expiry.lua); then the fields to read
-- Returns the time of creation of the last job that was looked at, false after the last of the list, and for each job
-- its id, its time of creation, whether it has an outcome, whether it has expired, and the values of the fields.
local before, from, max_looked_at, max_found, model, kind, excluded, is_failure_wanted = unpack(ARGV, 1, 8)
local fields = {unpack(ARGV, 9)}
max_looked_at, max_found = tonumber(max_looked_at), tonumber(max_found)
local entries = redis.call('ZREVRANGEBYSCORE', KEYS[1], before, from, 'WITHSCORES', 'LIMIT', 0, max_looked_at)

-- Say whether a job may have the status that is wanted. The caller knows it exactly.
local function can_match(id, status, expires_at)
  if not string.find(excluded, ',' .. status .. ',', 1, true) then return true end
  if is_failure_wanted ~= '1' then return false end
  return has_expired(id, status, expires_at)
    or status == 'finished' and redis.call('EXISTS', OUTCOME_ .. id) == 0
end

local found, last = {}, false
for i = 1, #entries, 2 do
  local id, created_at = entries[i], entries[i + 1]
  local job = JOB_ .. id
  local known = try('hash', 'HMGET', job, F_STATUS, F_MODEL, F_KIND, F_EXPIRES_AT)
  if known and known[1] and (model == '' or known[2] == model) and (kind == '' or known[3] == kind)
    and can_match(id, known[1], known[4]) then
    local has_outcome = redis.call('EXISTS', OUTCOME_ .. id)
    local is_expired = has_expired(id, known[1], known[4]) and 1 or 0
    found[#found + 1] = {id, created_at, has_outcome, is_expired, redis.call('HMGET', job, unpack(fields))}
  end
  last = created_at
  if #found == max_found then return {last, unpack(found)} end
end
if #entries < 2 * max_looked_at then last = false end
return {last, unpack(found)}
