-- Put before claim.lua.
--
-- Where owners share a queue, RQ's list holds at most a batch of jobs. What else is accepted waits behind it, in order
-- (store/lua/submit.lua), and comes onto the list by weighted round robin:
--
--   rq:queue:<queue>                     the next jobs, RQ's `queued`
--   scorepool:backlog:<queue>:<owner>    list: an owner's jobs behind it, RQ's `deferred`; also in rq:deferred:<queue>
--   scorepool:turns:<queue>              zset: owners that have a backlog, by how much they had of the queue: jobs / weight

-- Fill the list up to `depth` jobs, or until no owner has a backlog. An id whose job was canceled or deleted meanwhile is dropped; each is met once.
local function top_up(queue, depth)
  local name = string.sub(queue, #'rq:queue:' + 1)
  local turns = 'scorepool:turns:' .. name
  local missing = depth - redis.call('LLEN', queue)
  while missing > 0 do
    local owner = redis.call('ZRANGE', turns, 0, 0)[1]
    if not owner then return end
    local backlog = 'scorepool:backlog:' .. name .. ':' .. owner
    local id = redis.call('LINDEX', backlog, 0)
    if not id then
      redis.call('ZREM', turns, owner)  -- only now that its turn has come: who was just served and comes back waits for it
    else
      local job = 'rq:job:' .. id
      local known = redis.pcall('HMGET', job, 'status', 'weight')  -- an error where it is no hash: nobody's job
      redis.call('LPOP', backlog)
      redis.call('ZREM', 'rq:deferred:' .. name, id)
      if known[1] == 'deferred' then
        redis.call('HSET', job, 'status', 'queued')
        redis.call('RPUSH', queue, id)
        local weight = tonumber(known[2] or '')
        redis.call('ZINCRBY', turns, weight and weight >= 1 and weight < 1e9 and 1 / weight or 1, owner)  -- nonsense is none
        missing = missing - 1
      end
    end
  end
end
