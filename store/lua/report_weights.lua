-- flags: allow-oom
-- include: clock.lua
-- include: wrong_types.lua
--
-- Take what a worker says of the pending version. It is committed once every live worker of the model has loaded and
-- checked it, and dropped as soon as one refuses it. A worker whose registration expired is not waited for.
--
-- ARGV  model, worker, version, id of its push, fingerprint that the worker found or '', why it refuses the version or
--       '', names of the model's queues: jobs that wait for the version are due once it is committed
-- Returns 'committed', 'failed', or 'waiting'; 'gone' if the version is not pending.
local model, worker, version, push, fingerprint, refusal = unpack(ARGV)
local key, workers = WEIGHTS_ .. model, WEIGHTS_WORKERS_ .. model
local pending_source = redis.call('HGET', key, 'pending_source')
if redis.call('HGET', key, 'pending') ~= version or not pending_source then return 'gone' end
if cmsgpack.unpack(pending_source)['id'] ~= push then return 'gone' end  -- a version that was refused is pushed again

local function acks()
  local found = {}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 4) == 'ack:' then found[#found + 1] = field end
  end
  return found
end

local function finish()
  for _, field in ipairs(acks()) do redis.call('HDEL', key, field) end
  redis.call('HDEL', key, 'pending', 'pending_source', 'pending_fingerprint')
  redis.call('PUBLISH', WEIGHTS_CHANGED_ .. model, version)
end

local function drop_upload(source)
  local upload = source and cmsgpack.unpack(source)['upload']
  if type(upload) == 'string' then redis.call('UNLINK', WEIGHTS_UPLOAD_ .. upload) end
end

local known = redis.call('HGET', key, 'pending_fingerprint')
if refusal == '' and known and known ~= fingerprint then
  refusal = 'it found other weights than another worker did (fingerprints ' .. string.sub(fingerprint, 1, 12) .. ' and ' ..
    string.sub(known, 1, 12) .. ')'
end
if refusal ~= '' then
  drop_upload(pending_source)
  redis.call('HSET', key, 'failed', version, 'error', 'worker ' .. worker .. ': ' .. refusal)
  finish()
  return 'failed'
end
redis.call('HSET', key, 'pending_fingerprint', fingerprint, 'ack:' .. worker, fingerprint)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', '(' .. string.format('%.6f', now))
for _, live in ipairs(redis.call('ZRANGE', workers, 0, -1)) do
  if redis.call('HEXISTS', key, 'ack:' .. live) == 0 then return 'waiting' end
end
drop_upload(redis.call('HGET', key, 'source'))
redis.call('HDEL', key, 'label')
redis.call('HSET', key, 'version', version, 'source', pending_source,
  'fingerprint', fingerprint, 'at', string.format('%.3f', now))
finish()
for i = 7, #ARGV do
  local scheduled = SCHEDULED_ .. ARGV[i]
  for _, id in ipairs(try('zset', 'ZRANGE', scheduled, 0, 9999) or {}) do
    local wanted = tonumber(redis.pcall('HGET', JOB_ .. id, F_IF_WEIGHTS) or '')
    if wanted and wanted <= tonumber(version) then redis.call('ZADD', scheduled, string.format('%.0f', now), id) end
  end
end
return 'committed'
