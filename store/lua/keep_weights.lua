-- flags: allow-oom
--
-- Say which version a worker serves. If Redis lost what it knew of the versions, the worker's is committed again.
--
-- ARGV  model, worker, version, wire.WeightsSource, fingerprint, unix time at which the worker moved to it
local model, worker, version, source, fingerprint, at = unpack(ARGV)
local key = WEIGHTS_ .. model
redis.call('HSET', WEIGHTS_MOVES_ .. model, worker, version .. ' ' .. at)
if tonumber(version) > tonumber(redis.call('HGET', key, 'version') or '0') then
  redis.call('HSET', key, 'version', version, 'source', source, 'fingerprint', fingerprint, 'at', at)
end
return 1
