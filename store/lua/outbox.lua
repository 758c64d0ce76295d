-- Deliveries: RQ jobs on the queue of webhooks, each with all that its attempts need, so that they outlive the job that
-- they tell of. Fields of ours beside RQ's:
--
--   owner, event, model, at    what is told; `at` is when the job ended, ISO
--   job | batch                the id of what ended; not in a test event
--   endpoint | url             to whom: an endpoint of the owner's by id, or the URL that the job itself named
--   since                      unix, s: its schedule began here
--   tries, attempts, reason    worker/webhooks/webhook_worker.py's record of what came of it

local ENDED = {finished = 'job.finished', failed = 'job.failed', canceled = 'job.canceled', stopped = 'job.canceled'}

-- Unix time, s, later than that of every delivery in the owner's list: pages go by it. Counted in whole microseconds.
local function place(list)
  local time = redis.call('TIME')
  local us = tonumber(time[1]) * 1e6 + tonumber(time[2])
  local newest = tonumber(redis.call('ZREVRANGE', list, 0, 0, 'WITHSCORES')[2] or 0)
  if newest < 1e11 then us = math.max(us, math.floor(newest * 1e6 + 0.5) + 1) end  -- else it is no time
  return string.format('%d.%06d', math.floor(us / 1e6), us % 1e6)
end

local function deliver(id, owner, ttl_s, iso, what)
  local list = DELIVERIES .. owner
  local now = place(list)
  local key = 'rq:job:' .. id
  redis.call('HSET', key,
    'data', '["' .. DELIVER .. '", null, [], {}]', 'origin', WEBHOOKS, 'description', 'webhook ' .. what.event,
    'status', 'queued', 'created_at', iso, 'enqueued_at', iso, 'timeout', 120,
    'retries_left', 9, 'retry_intervals', '[60]',  -- of a worker that fails; receivers that do have their own schedule
    'result_ttl', ttl_s, 'failure_ttl', math.max(ttl_s, KEPT_S), 'owner', owner, 'since', now)
  for name, value in pairs(what) do
    redis.call('HSET', key, name, value)
  end
  redis.call('SADD', 'rq:queues', 'rq:queue:' .. WEBHOOKS)
  redis.call('RPUSH', 'rq:queue:' .. WEBHOOKS, id)
  redis.call('PUBLISH', BELL, id)

  -- Deliveries expire by themselves but their ids in the owner's list do not: each new one looks at two.
  redis.call('ZADD', list, now, id)
  for _, other in ipairs(redis.call('ZRANDMEMBER', list, 2)) do
    if redis.call('EXISTS', 'rq:job:' .. other) == 0 then redis.call('ZREM', list, other) end
  end
end

-- The id of an endpoint that wants to hear of the event, or nil. Raises an error for a text that is no endpoint.
local function wants(text, event)
  local endpoint = cjson.decode(text).endpoint
  if endpoint.disabled_at and endpoint.disabled_at ~= cjson.null then return nil end
  for _, wanted in ipairs(endpoint.events) do
    if wanted == event then return endpoint.id .. '' end
  end
end

-- Create the deliveries for a job that has just ended: to its own webhook, and to its owner's endpoints. The endpoints
-- get no event for a synchronous request: its client has the answer, and the result expires within a minute.
local function announce(id, iso, ttl_s)
  local job = 'rq:job:' .. id
  local known = redis.call('HMGET', job, 'owner', 'webhook', 'status', 'model', 'ended_at', 'batch', 'synchronous')
  if known[6] then return end  -- the batch is told of, not each of its 50,000 lines
  local owner, url, event = known[1] or '', known[2], ENDED[known[3]]
  local endpoints = known[7] and {} or redis.pcall('HVALS', ENDPOINTS .. owner)
  if endpoints.err then endpoints = {} end  -- a key of another type must not keep jobs from ending
  if not event or (not url and #endpoints == 0) then return end

  local at = known[5] and known[5] ~= '' and known[5] or iso
  local num_ends = redis.call('HINCRBY', job, 'ends', 1)  -- more than one when `rq requeue` ran it again: another event
  local event_id = 'wh_' .. id .. (num_ends > 1 and '-' .. num_ends or '')
  local ids = {}
  local function tell(delivery_id, to, value)
    deliver(delivery_id, owner, ttl_s, iso, {event = event, model = known[4] or '', at = at, job = id, [to] = value})
    ids[#ids + 1] = delivery_id
  end
  if url then tell(event_id, 'url', url) end
  for _, text in ipairs(endpoints) do
    local is_read, endpoint = pcall(wants, text, event)  -- a text that cannot be read must not keep a job from ending
    if is_read and endpoint then tell(event_id .. '_' .. endpoint, 'endpoint', endpoint) end
  end
  if #ids > 0 then
    local before = redis.call('HGET', job, 'deliveries')
    redis.call('HSET', job, 'deliveries', (before and before .. ' ' or '') .. table.concat(ids, ' '))
  end
end
