-- include: lease.lua
-- include: backlog.lua
--
-- Take the next job off a queue and lease it, in one step, so that a job is always in the list or in the registry.

-- Return the sizes of a queue: of its list, of its registry, and how many owners have a backlog. Return nil for a queue with
-- a key of a wrong type, which is left alone.
local function sizes(list, wip)
  local num_listed, num_held, num_sharing = try('list', 'LLEN', list), try('zset', 'ZCARD', wip), num_sharing(list)
  if num_listed and num_held and num_sharing then return num_listed, num_held, num_sharing end
end

-- Return the id of the first job of the queue that exists, and its max_concurrency (see reclaim.lua). Ids of jobs that expired
-- or were deleted are dropped. The first `num_passed` entries are passed over. `list_length`: see backlog.lua.
local function head(list, list_length, num_passed)
  while true do
    local id = redis.call('LINDEX', list, num_passed)
    if not id then
      top_up(list, num_passed + list_length)
      id = redis.call('LINDEX', list, num_passed)
      if not id then return nil end
    end
    if string.match(id, '^[%w_-]+$') then
      local known = redis.pcall('HMGET', JOB_ .. id, F_DATA, F_MAX_CONCURRENCY)  -- an error if the key is no hash: then there is no job
      if known[1] then return id, tonumber(known[2] or '') end
    end
    redis.call('LREM', list, 1, id)
  end
end

-- Take a job off the list, of which it is one of the first, and lease it. Return its row.
local function take(index, list, wip, id, execution, worker, lease_ms, grace_s)
  redis.call('LREM', list, 1, id)
  redis.call('DEL', OUTCOME_ .. id)  -- of an earlier run, when the job was queued again by hand
  return lease(index, id, execution, wip, worker, lease_ms, grace_s)
end
