-- include: wrong_types.lua
--
-- How fast the workers of a queue are, so that each claims its share:
--
--   <speeds>:<queue>   hash: <speed>:<time (unix, s)> of each worker of the queue. The speed is work per second, by the
--                      worker's own measure, or '' while it has none
--
--   <speed_totals>:<queue>   string: <workers> <their speeds together>; expires. Of many workers, only these are used, so that
--                      a claim costs no more in a large fleet
--
-- A worker that has written nothing for SILENT_S sleeps or is cut off, so it counts no longer.

local SILENT_S, KEPT_S = 2, 3600
local MANY_WORKERS, TOTALS_MS = 64, 1000

local function write_speed(queue, worker, speed, now)
  if try('hash', 'HSET', SPEEDS_ .. queue, worker, speed .. ':' .. string.format('%.3f', now)) then
    redis.call('EXPIRE', SPEEDS_ .. queue, KEPT_S)
  end
end

local function speed_of(queue, worker)
  return tonumber(string.match(try('hash', 'HGET', SPEEDS_ .. queue, worker) or '', '^(.*):') or '') or 0
end

-- Return a speed that another client may have written, or nil if it cannot be one.
local function sane(speed)
  return speed and speed > 0 and speed < 1e12 and speed or nil
end

-- Return the speeds of the workers of these queues that are heard of, by name. One without a measure has the mean speed.
local function speeds_of(worker, queues, now)
  local speeds, unknown = {}, {}
  for _, queue in ipairs(queues) do
    local flat = try('hash', 'HGETALL', SPEEDS_ .. queue) or {}
    for i = 1, #flat, 2 do
      local speed, written_at = string.match(flat[i + 1], '^(.*):(.*)$')
      local age_s = now - (tonumber(written_at or '') or 0)
      if age_s > KEPT_S then
        redis.call('HDEL', SPEEDS_ .. queue, flat[i])
      elseif age_s < SILENT_S or flat[i] == worker then
        speeds[flat[i]] = sane(tonumber(speed))
        unknown[flat[i]] = not speeds[flat[i]] or nil
      end
    end
  end
  local num_known, sum = 0, 0
  for _, speed in pairs(speeds) do num_known, sum = num_known + 1, sum + speed end
  for name in pairs(unknown) do speeds[name] = num_known > 0 and sum / num_known or 1 end
  return speeds
end

-- Return the least time in which these workers together end so many jobs, each whole ones; nil if there is nothing to divide.
local function time_for(speeds, num_jobs)
  local num_workers, sum = 0, 0
  for _, speed in pairs(speeds) do num_workers, sum = num_workers + 1, sum + speed end
  if num_workers < 2 or sum <= 0 then return nil end
  local too_short, enough = 0, (num_jobs + num_workers) / sum
  for _ = 1, 40 do
    local time, num_ended = (too_short + enough) / 2, 0
    for _, speed in pairs(speeds) do num_ended = num_ended + math.floor(time * speed) end
    if num_ended >= num_jobs then enough = time else too_short = time end
  end
  return enough
end

-- Return how many workers there are, and their speeds together, as of the last second.
local function totals_of(queues, now)
  local key = SPEED_TOTALS_ .. queues[1]
  local num, sum = string.match(try('string', 'GET', key) or '', '^(%d+) (.+)$')
  num, sum = tonumber(num or ''), sane(tonumber(sum or ''))
  if num and sum then return num, sum end
  num, sum = 0, 0
  for _, speed in pairs(speeds_of('', queues, now)) do num, sum = num + 1, sum + speed end
  try('string', 'SET', key, num .. ' ' .. string.format('%.6g', sum), 'PX', TOTALS_MS)
  return num, sum
end

-- Return the least time in which the workers of these queues end so many jobs, and a function that returns a worker's speed.
-- The time is nil if there is nothing to divide. Of many workers it is that of workers of one speed.
local function plan_of(worker, queues, num_jobs, now)
  local fullest, num_workers = queues[1], 0
  for _, queue in ipairs(queues) do
    local num = try('hash', 'HLEN', SPEEDS_ .. queue) or 0
    if num > num_workers then fullest, num_workers = queue, num end
  end
  if num_workers <= MANY_WORKERS then
    local speeds = speeds_of(worker, queues, now)
    return time_for(speeds, num_jobs), function(name) return speeds[name] end
  end
  local num, sum = totals_of(queues, now)
  if num < 2 then return nil, function() return nil end end
  return (num_jobs + num - 1) / sum, function(name) return sane(speed_of(fullest, name)) or sum / num end
end

-- Return how many of these jobs a worker should have so that all workers end the last of them as early as possible.
local function share_of(worker, queues, num_jobs, now)
  local time, own_speed = plan_of(worker, queues, num_jobs, now)
  local speed = own_speed(worker)
  return time and speed and math.floor(time * speed) or num_jobs
end
