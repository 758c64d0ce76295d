-- include: clock.lua
-- include: wrong_types.lua
--
-- A job expires at its `expires_at` if no worker holds it then: it waits, or the lease of its worker is over and
-- nobody has put the job back. A worker that holds it ends it at that time, so the job expires with the lease.
--
-- The API shows an expired job as failed, and the next claim or cancellation records this. The lease with which the
-- job expired stays over: see is_held.lua.

local alive = {created = true, queued = true, deferred = true, scheduled = true, started = true}

-- True if a job of this status, as RQ spells it, has not ended, unless it has expired.
local function is_alive(status)
  return alive[status] == true
end

-- True if `text`, the field `expires_at` of a job, is a time in the past.
local function is_past(text)
  return (tonumber(text or '') or math.huge) <= now
end

-- Return the seconds until the last lease of a job ends, unless its worker extends it; 0 if no worker holds the job.
local function lease_left_s(id)
  local left_ms = 0
  for _, execution in ipairs(try('zset', 'ZRANGE', EXECUTIONS_ .. id, 0, -1) or {}) do
    left_ms = math.max(left_ms, redis.call('PTTL', EXECUTION_ .. id .. ':' .. execution))
  end
  return left_ms / 1000
end

-- Return the seconds until a job expires as things stand, 0 if it has; infinity if it never does, or has ended.
-- Leases are looked up only for a job past its `expires_at`.
local function expires_in_s(id, status, expires_at)
  if not is_alive(status) then return math.huge end
  if not is_past(expires_at) then return (tonumber(expires_at or '') or math.huge) - now end
  return status == 'started' and lease_left_s(id) or 0
end

local function has_expired(id, status, expires_at)
  return expires_in_s(id, status, expires_at) == 0
end
