-- Redis's clock. Those of the processes differ, so no time that a script writes is that of its caller.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6  -- unix, s

-- Return a time in the form in which RQ writes it. The date is computed from the number of days since 0000-03-01.
local function iso_time(unix_s)
  local s = math.floor(unix_s)
  local days = math.floor(s / 86400) + 719468
  local era = math.floor(days / 146097)
  local day = days - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  day = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * day + 2) / 153)
  day = day - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', year, month, day,
    math.floor(s / 3600) % 24, math.floor(s / 60) % 60, s % 60, math.floor((unix_s - s) * 1e6))
end

local iso_now = iso_time(now)
