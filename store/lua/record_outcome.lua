-- flags: allow-oom
-- include: end_job.lua
--
-- Record the outcome of a job that RQ's own methods end in the same transaction (worker/rq/job.py).
--
-- ARGV  id, outcome, seconds that it is kept or 0, '1': keep the request, queue if the job was canceled or ''
-- Returns the keys of a wrong type, see wrong_types.lua.
local id, outcome, ttl_s, keep_request, canceled_queue = unpack(ARGV)
record_outcome(id, outcome, tonumber(ttl_s), keep_request == '1')
if canceled_queue ~= '' then  -- RQ files it as failed, and `rq requeue --all` would run it again
  try('zset', 'ZREM', FAILED_ .. canceled_queue, id)
  file_as_canceled(id, canceled_queue, tonumber(ttl_s))
end
return wrong_types
