-- include: outbox.lua
-- include: ledger.lua
--
-- End a job: everything that its end leaves in Redis is written here. finish.lua, cancel.lua and empty.lua call `end_job`.
-- RQ's own methods, which end the other jobs, set status and registry themselves and call `record_outcome`.

local now_s = math.floor(now)
local SMALL_REQUEST_BYTES = 16 * 1024  -- of a finished job, kept with its outcome, to be looked at and submitted again
local REGISTRIES = {finished = FINISHED_, failed = FAILED_, canceled = CANCELED_}

-- Write the outcome of a job whose status is set, count it, wake the clients that wait for it, and report it by webhooks.
-- `ttl_s` 0 keeps the outcome for ever. Nothing is written twice: an outcome that exists is that of this run, because a
-- claim deletes the outcome of an earlier run. `keep_request` keeps the request, too; else only a small one of
-- a finished job is kept: who cancels a job makes room.
local function record_outcome(id, body, ttl_s, keep_request)
  local job, outcome, request = JOB_ .. id, OUTCOME_ .. id, REQUEST_ .. id
  local expiry = ttl_s > 0 and {'EX', ttl_s} or {}
  if not redis.call('SET', outcome, body, 'NX', unpack(expiry)) then
    if is_type(outcome, 'string') then return end
    redis.call('SET', outcome, body, unpack(expiry))  -- replaces a key of any type
  end
  try('stream', 'XADD', DONE, 'MAXLEN', '~', 10000, '*', 'id', id)
  local code = 'result'
  local status, owner, created, checkpoint = unpack(redis.call('HMGET', job, F_STATUS, F_OWNER, F_CREATED, F_CHECKPOINT), 1, 4)
  if checkpoint then redis.call('DEL', CHECKPOINT_ .. id) end
  if status ~= 'finished' then
    local is_read, failure = pcall(cmsgpack.unpack, body)
    code = is_read and type(failure) == 'table' and failure.code or 'internal'
  end
  try('hash', 'HINCRBY', OUTCOME_COUNTS, code, 1)
  if code == 'result' then
    local latency_s = math.max(0, now - (tonumber(created or '') or now))
    try('hash', 'HINCRBY', OUTCOME_COUNTS, LATENCY_MS, math.floor(1000 * latency_s))
  end
  redis.call('HDEL', job, F_CANCEL_REQUESTED, F_CRASHES, F_MAX_CONCURRENCY, F_CHECKPOINT, F_FURTHEST)
  local request_bytes = try('string', 'STRLEN', request) or 0
  if not keep_request and (status ~= 'finished' or request_bytes > SMALL_REQUEST_BYTES) then
    redis.call('DEL', request)
    request_bytes = 0
  elseif ttl_s > 0 then
    redis.call('EXPIRE', request, ttl_s)
  end
  if ttl_s > 0 then redis.call('EXPIRE', RESPONSE_ .. id, ttl_s) end
  local num_bytes = JOB_BYTES + #body + request_bytes + (try('string', 'STRLEN', RESPONSE_ .. id) or 0)
  write_size(owner or '', id, num_bytes, ttl_s > 0 and now_s + ttl_s + 1 or later(now_s), true)
  report_end(id, ttl_s > 0 and ttl_s or DELIVERY_KEPT_S)
end

-- List a canceled job for as long as it is kept; RQ would list it for ever. Each canceled job checks two ids of the list at
-- random and drops those of jobs that have expired.
local function file_as_canceled(id, queue, ttl_s)
  local canceled = CANCELED_ .. queue
  try('zset', 'ZADD', canceled, now_s, id)
  if ttl_s > 0 then
    redis.call('EXPIRE', JOB_ .. id, ttl_s)
    for _, other in ipairs(try('zset', 'ZRANDMEMBER', canceled, 2) or {}) do
      if redis.call('EXISTS', JOB_ .. other) == 0 then redis.call('ZREM', canceled, other) end
    end
  end
end

-- End a job that is in no list of its queue. `fields` of its hash are set with its status. `outcome` is nil for a job that
-- is not of the API.
local function end_job(id, queue, status, fields, outcome, ttl_s)
  local job = JOB_ .. id
  redis.call('HSET', job, F_STATUS, status, unpack(fields))
  if status == 'canceled' then
    file_as_canceled(id, queue, ttl_s)
  else
    try('zset', 'ZADD', REGISTRIES[status] .. queue, now_s + ttl_s, id)
    redis.call('EXPIRE', job, ttl_s)
  end
  if outcome then
    record_outcome(id, outcome, ttl_s, status == 'failed')  -- a failed job keeps its request, for `rq requeue`
  else
    redis.call('HDEL', job, F_CRASHES, F_MAX_CONCURRENCY)
  end
end

-- End a job of the API that waits or has expired. The caller removes it from the lists of its queue.
local function end_waiting_job(id, queue, status, outcome, ttl_s)
  redis.call('DEL', OUTCOME_ .. id)  -- the outcome of an earlier run
  end_job(id, queue, status, {F_ENDED_AT, iso_now}, outcome, ttl_s)
end

-- Take a job away from every worker that holds it: their leases are gone, and they record nothing.
local function drop_leases(id, queue)
  local executions = try('zset', 'ZRANGE', EXECUTIONS_ .. id, 0, -1) or {}
  for _, execution in ipairs(executions) do
    try('zset', 'ZREM', WIP_ .. queue, id .. ':' .. execution)
    redis.call('DEL', EXECUTION_ .. id .. ':' .. execution)
  end
  redis.call('DEL', EXECUTIONS_ .. id)
  if executions[1] or redis.pcall('HGET', JOB_ .. id, F_STATUS) ~= 'started' then return end
  -- A lease whose score is over is in the registry alone: the list of the job's executions has expired (see lease.lua).
  for _, lease_key in ipairs(try('zset', 'ZRANGEBYSCORE', WIP_ .. queue, '-inf', now) or {}) do
    if string.sub(lease_key, 1, #id + 1) == id .. ':' then redis.call('ZREM', WIP_ .. queue, lease_key) end
  end
end

-- Remove a job that waits or has expired from every list of its queue. An expired job may be leased to a worker that is
-- about to record this, or that is gone. Its lease would put the job back when it ends, and the job would end twice.
local function remove_from_queue(id, queue, owner)
  drop_leases(id, queue)
  try('list', 'LREM', QUEUE_ .. queue, 0, id)
  try('list', 'LREM', BACKLOG_ .. queue .. ':' .. owner, 1, id)  -- up to 100,000 ids: stop at the first match
  try('zset', 'ZREM', SCHEDULED_ .. queue, id)
  try('zset', 'ZREM', DEFERRED_ .. queue, id)
end

-- Return the seconds for which a failed or canceled job is kept: `text`, the field of its hash, or the default.
local function failure_ttl_s(text, default_s)
  local ttl_s = tonumber(text or '')
  return ttl_s and ttl_s >= 1 and ttl_s < 1e9 and math.floor(ttl_s) or tonumber(default_s)
end
