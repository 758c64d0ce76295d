-- include: wrong_types.lua
--
-- How fast the workers of a queue are, so that each claims its share:
--
--   <speeds>:<queue>   hash: <speed>:<time (unix, s)> of each worker of the queue. The speed is work per second, by the
--                      worker's own measure, or '' while it has none
--
-- A worker that has written nothing for SILENT_S sleeps or is cut off, so it counts no longer.

local SILENT_S, KEPT_S = 5, 3600

local function write_speed(queue, worker, speed, now)
  if try('hash', 'HSET', SPEEDS_ .. queue, worker, speed .. ':' .. string.format('%.3f', now)) then
    redis.call('EXPIRE', SPEEDS_ .. queue, KEPT_S)
  end
end

local function speed_of(queue, worker)
  return tonumber(string.match(try('hash', 'HGET', SPEEDS_ .. queue, worker) or '', '^(.*):') or '')
end

-- Return the part of the work of these queues that a worker may do, from 0 to 1: its speed among those of all workers that
-- are heard of. A worker without a speed counts as one of mean speed.
local function share_of(worker, queues, now)
  local speeds = {}  -- by worker; false: unknown
  for _, queue in ipairs(queues) do
    local flat = try('hash', 'HGETALL', SPEEDS_ .. queue) or {}
    for i = 1, #flat, 2 do
      local speed, written_at = string.match(flat[i + 1], '^(.*):(.*)$')
      local age_s = now - (tonumber(written_at or '') or 0)
      if age_s > KEPT_S then
        redis.call('HDEL', SPEEDS_ .. queue, flat[i])
      elseif age_s < SILENT_S or flat[i] == worker then
        speeds[flat[i]] = tonumber(speed) or speeds[flat[i]] or false
      end
    end
  end
  local num_known, num_all, known = 0, 0, 0
  for _, speed in pairs(speeds) do
    num_all = num_all + 1
    if speed then num_known, known = num_known + 1, known + speed end
  end
  if num_all <= 1 then return 1 end
  local mean = num_known > 0 and known / num_known or 1
  local total = known + mean * (num_all - num_known)
  return total > 0 and (speeds[worker] or mean) / total or 1
end
