-- include: clock.lua
--
-- Make a version of a model's weights pending, so that its workers load and check it. See store/weights.py.
--
-- ARGV  model, version or '' for the next one, wire.WeightsSource, id of the upload that it names or ''
-- Returns 'pushed' and the version, or why not: 'unserved', 'pending' and that version, 'old' and the committed version.
-- A second call with one source, because the answer to the first was lost, is answered like the first.
local model, wanted, source, upload = unpack(ARGV)
local key = WEIGHTS_ .. model
local last = tonumber(redis.call('HGET', key, 'version') or '0')
local push = cmsgpack.unpack(source)['id']
for version_field, source_field in pairs({pending = 'pending_source', version = 'source'}) do
  local known, pushed = unpack(redis.call('HMGET', key, version_field, source_field))
  if known and pushed and cmsgpack.unpack(pushed)['id'] == push then return {'pushed', tonumber(known)} end
end
if redis.call('ZCOUNT', WEIGHTS_WORKERS_ .. model, now, '+inf') == 0 then return {'unserved', 0} end
local pending = redis.call('HGET', key, 'pending')
if pending then return {'pending', tonumber(pending)} end
local version = wanted == '' and last + 1 or tonumber(wanted)
if version <= last then return {'old', last} end
local v = string.format('%.0f', version)
if upload ~= '' then redis.call('PERSIST', WEIGHTS_UPLOAD_ .. upload) end
redis.call('HDEL', key, 'failed', 'error')
redis.call('HSET', key, 'pending', v, 'pending_source', source)
redis.call('PUBLISH', WEIGHTS_CHANGED_ .. model, v)
return {'pushed', version}
