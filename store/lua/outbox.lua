-- include: clock.lua
-- include: push_delivery.lua
-- include: ledger.lua
--
-- Create deliveries: RQ jobs on the queue of webhooks. A delivery holds all that its attempts need, because it may outlive
-- the job whose end it reports. The transaction that ends the job creates it. Our fields of its hash, beside RQ's:
--
--   owner, event, model, at    what is reported; `at` is when the job ended, ISO
--   job | batch                the id of what ended; absent in a test event
--   endpoint | url             the receiver: the id of an endpoint of the owner, or the URL that the job named
--   since                      unix, s: the schedule of its attempts began
--   traceparent                that of the job, if it is traced
--   tries, attempts, reason    its attempts so far, written by worker/webhooks/webhook_worker.py

local EVENTS = {finished = 'job.finished', failed = 'job.failed', canceled = 'job.canceled', stopped = 'job.canceled'}
local SWEEP_S = 60  -- until the first sweep of a new list of ids (see sweep.lua)

-- Return a unix time, s, in whole microseconds. It is later than that of every delivery in the owner's list, because the
-- cursor of a page is such a time.
local function creation_time(list)
  local us = tonumber(time[1]) * 1e6 + tonumber(time[2])
  local last = try('zset', 'ZREVRANGE', list, 0, 0, 'WITHSCORES')
  local newest = tonumber(last and last[2] or 0)
  if newest < 1e11 then us = math.max(us, math.floor(newest * 1e6 + 0.5) + 1) end  -- a greater score is no time of ours
  return string.format('%d.%06d', math.floor(us / 1e6), us % 1e6)
end

-- Create and queue one delivery. `fields` are those of what is reported and of the receiver.
local function create_delivery(id, owner, ttl_s, fields)
  local list = DELIVERIES_OF_ .. owner
  local now = creation_time(list)
  local key = JOB_ .. id
  if not is_type(key, 'hash') then return end
  redis.call('HSET', key,
    F_DATA, '["' .. DELIVER .. '", null, [], {}]', F_ORIGIN, WEBHOOKS, F_DESCRIPTION, 'webhook ' .. fields[F_EVENT],
    F_CREATED_AT, iso_now, F_ENQUEUED_AT, iso_now, F_TIMEOUT, 120,
    F_RETRIES_LEFT, 9, F_RETRY_INTERVALS, '[60]',  -- for failures of the worker; failures of receivers have their own schedule
    F_RESULT_TTL, ttl_s, F_FAILURE_TTL, math.max(ttl_s, DELIVERY_KEPT_S), F_OWNER, owner, F_SCHEDULED_FROM, now)
  for name, value in pairs(fields) do
    redis.call('HSET', key, name, value)
  end
  try('set', 'SADD', QUEUES, QUEUE_ .. WEBHOOKS)
  push_delivery(owner, id, now)
  if redis.call('EXISTS', LEDGER_OF_ .. owner) == 1 then write_size(owner, id, DELIVERY_BYTES, later(now)) end

  -- A delivery expires by itself, but its id in the owner's list does not. Each new delivery checks two ids at random.
  try('zset', 'ZADD', list, now, id)
  try('zset', 'ZADD', SWEEP_SCHEDULE, 'NX', now + SWEEP_S, list)
  for _, other in ipairs(try('zset', 'ZRANDMEMBER', list, 2) or {}) do
    if redis.call('EXISTS', JOB_ .. other) == 0 then redis.call('ZREM', list, other) end
  end
end

-- Return the id of an endpoint that wants the event, or nil. Raise an error for a text that is no wire.Subscriber.
local function subscribed_endpoint(text, event)
  local endpoint = cjson.decode(text).endpoint
  if endpoint.disabled_at and endpoint.disabled_at ~= cjson.null then return nil end
  for _, wanted in ipairs(endpoint.events) do
    if wanted == event then return endpoint.id .. '' end
  end
end

-- Create the deliveries that report the end of a job: to its own webhook, and to the endpoints of its owner that subscribe
-- to the event. Endpoints get no event for a synchronous request, because its client has the answer and the result expires
-- within a minute.
local function report_end(id, ttl_s)
  local job = JOB_ .. id
  local owner, url, status, model, ended_at, batch, is_synchronous, traceparent = unpack(redis.call('HMGET', job,
    F_OWNER, F_WEBHOOK, F_STATUS, F_MODEL, F_ENDED_AT, F_BATCH, F_SYNCHRONOUS, F_TRACEPARENT), 1, 8)
  if batch then return end  -- the end of the batch is reported, not those of its lines, of which there may be 50,000
  owner = owner or ''
  local event = EVENTS[status]
  local endpoints = not is_synchronous and try('hash', 'HVALS', ENDPOINTS_OF_ .. owner) or {}
  if not event or (not url and #endpoints == 0) then return end

  local at = ended_at and ended_at ~= '' and ended_at or iso_now
  local num_ends = tonumber(try('hash', 'HINCRBY', job, F_NUM_ENDS, 1)) or 1  -- each end of a job that `rq requeue` ran again is another event
  local event_id = DELIVERY_ID_ .. id .. (num_ends > 1 and '-' .. num_ends or '')
  local ids = {}
  local function report(delivery_id, receiver, value)
    local fields = {[F_EVENT] = event, [F_MODEL] = model or '', [F_EVENT_AT] = at, [F_JOB] = id, [receiver] = value}
    if traceparent then fields[F_TRACEPARENT] = traceparent end
    create_delivery(delivery_id, owner, ttl_s, fields)
    ids[#ids + 1] = delivery_id
  end
  if url then report(event_id, F_URL, url) end
  for _, text in ipairs(endpoints) do
    local is_read, endpoint = pcall(subscribed_endpoint, text, event)  -- a text that cannot be read must not keep a job from ending
    if is_read and endpoint then report(event_id .. '_' .. endpoint, F_ENDPOINT, endpoint) end
  end
  if #ids > 0 then
    local before = redis.call('HGET', job, F_DELIVERIES)
    redis.call('HSET', job, F_DELIVERIES, (before and before .. ' ' or '') .. table.concat(ids, ' '))
  end
end
