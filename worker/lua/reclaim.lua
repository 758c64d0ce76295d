-- Take jobs back from workers that are gone: to the front of their queue, one crash counted, no Retry spent.
-- A job with too many crashes, or that its owner canceled, is leased to the caller instead, who ends it.
--
-- KEYS  rq:queue:<queue>, rq:wip:<queue> of each queue
-- ARGV  see worker/lease.py
-- Returns {number of jobs put back, rows (see lease.lua) of jobs to end}.
local crash_limit, executions = tonumber(ARGV[1]), ARGV[2]
local worker, lease_ms, now, iso, grace_s = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local num_back, rows = 0, {}
for index = 1, #KEYS / 2 do
  local queue, wip = KEYS[2 * index - 1], KEYS[2 * index]
  for _, member in ipairs(redis.call('ZRANGE', wip, 0, -1)) do
    if redis.call('EXISTS', 'rq:execution:' .. member) == 0 then
      redis.call('ZREM', wip, member)
      local id, execution = string.match(member, '^(.*):(.*)$')
      local job = 'rq:job:' .. (id or '')
      if id and redis.call('HEXISTS', job, 'data') == 1 then
        redis.call('ZREM', 'rq:executions:' .. id, execution)
        local crashes = redis.call('HINCRBY', job, 'crashes', 1)
        if crashes >= crash_limit or redis.call('HGET', job, 'cancel_requested') == '1' then
          rows[#rows + 1] =
            lease(index, id, string.format('%s%08x', executions, #rows), wip, worker, lease_ms, now, iso, grace_s)
        else
          redis.call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '', 'enqueued_at', iso)
          redis.call('LPUSH', queue, id)
          num_back = num_back + 1
        end
      end
    end
  end
end
return {num_back, rows}
