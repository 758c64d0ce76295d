-- include: next_job.lua
--
-- Fairness between owners comes before the priority of one owner's jobs. If several owners have jobs in the queues of a
-- worker, the next job is that of the owner that has been served least by its weight, and of its jobs the one in the first
-- queue. In the order of the queues alone, one owner's `high` jobs would stop the `normal` ones of all others.
--
--   <served>:<first queue>   hash: the clock of each owner, jobs served / weight; '': the clock of the last that was served.
--                            An owner that comes back starts at that one, so it cannot save up turns.

local SERVED_KEPT_S = 3600

-- Return the jobs that each owner could run next: {owner, jobs = {{index of the queue, id, max_concurrency, turn}, ...}}, in
-- the order in which the owners appear. Of a list only the first `list_length` jobs are looked at, and the suspects among
-- them, which may be passed over (see claim.lua). An entry without an id stands for the owner's backlog.
local function find_owners(lists, usable, list_length)
  local owners, by_name = {}, {}
  local function add(name, entry)
    if not by_name[name] then
      by_name[name] = {name = name, jobs = {}}
      owners[#owners + 1] = by_name[name]
    end
    table.insert(by_name[name].jobs, entry)
  end
  -- Add the first jobs of a list.
  local function add_listed(index, list)
    local at, num_left, gone = 0, list_length, {}
    while num_left > 0 do
      local ids = redis.call('LRANGE', list, at, at + num_left - 1)
      if not ids[1] then break end
      at = at + #ids
      for _, id in ipairs(ids) do
        local known = redis.pcall('HMGET', JOB_ .. id, F_DATA, F_OWNER, F_MAX_CONCURRENCY, F_WEIGHT)
        if known[1] and string.match(id, '^[%w_-]+$') then
          add(known[2] or '', {index, id, tonumber(known[3] or ''), turn_of(known[4])})
          num_left = num_left - (known[3] and 0 or 1)
        else
          gone[#gone + 1] = id  -- the job expired or was deleted
        end
      end
    end
    for _, id in ipairs(gone) do redis.call('LREM', list, 1, id) end
  end

  for index, list in ipairs(lists) do
    if usable[index] then add_listed(index, list) end
    local fair_share = FAIR_SHARE_ .. string.sub(list, #QUEUE_ + 1)
    for _, name in ipairs(usable[index] and redis.call('ZRANGE', fair_share, 0, -1) or {}) do add(name, {index}) end
  end
  return owners
end

-- Return a function that returns the next job of these owners, or nil: its queue's index, id and max_concurrency. It returns
-- the same job until one of two other functions is called: `serve`, which counts it as leased, or `pass_over`.
local function owner_turns(owners, lists)
  local served = SERVED_ .. string.sub(lists[1], #QUEUE_ + 1)
  local clock = tonumber(try('hash', 'HGET', served, '') or '') or 0
  for _, owner in ipairs(owners) do
    owner.clock = tonumber(try('hash', 'HGET', served, owner.name) or '') or 0
  end
  local current

  -- Return the first job of the owner: of its backlog only if it is needed, because it leaves the backlog then.
  local function first_job(owner)
    while owner.jobs[1] do
      local job = owner.jobs[1]
      if job[2] then return job end
      local queue = string.sub(lists[job[1]], #QUEUE_ + 1)
      local id, turn = pop_backlog(queue, owner.name)
      if id then
        redis.call('LPUSH', lists[job[1]], id)
        redis.call('HSET', JOB_ .. id, F_STATUS, 'queued')
        table.insert(owner.jobs, 1, {job[1], id, tonumber(redis.call('HGET', JOB_ .. id, F_MAX_CONCURRENCY) or ''), turn})
      else
        table.remove(owner.jobs, 1)
      end
    end
  end

  local function next_job()
    while not current do
      local best
      for _, owner in ipairs(owners) do
        owner.clock = math.max(owner.clock, clock)
        if owner.jobs[1] and (not best or owner.clock < best.clock
          or owner.clock == best.clock and owner.jobs[1][1] < best.jobs[1][1]) then best = owner end
      end
      if not best then return nil end
      if first_job(best) then current = best end
    end
    return unpack(current.jobs[1], 1, 3)
  end

  local function serve()
    clock = current.clock
    current.clock = clock + table.remove(current.jobs, 1)[4]
    local first, last = string.format('%.9f', clock), string.format('%.9f', current.clock)
    if try('hash', 'HSET', served, '', first, current.name, last) then redis.call('EXPIRE', served, SERVED_KEPT_S) end
    current = nil
  end

  local function pass_over()
    table.remove(current.jobs, 1)
    current = nil
  end

  return next_job, serve, pass_over
end
