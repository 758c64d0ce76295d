-- include: unserved.lua
--
-- Add up the jobs of some of the queues that are not served. There may be any number of queues, so the caller asks for as many
-- at a time as block Redis for a few milliseconds.
--
-- ARGV  cursor of SSCAN over RQ's queues, about how many to look at, then the names of the queues that are served
-- Returns {next cursor, number of queues, {jobs that wait, are started, finished, failed, canceled}, the ISO time at which the
-- job that has waited longest was queued, or ''}
local is_known = {}
for i = 3, #ARGV do is_known[QUEUE_ .. ARGV[i]] = true end
local scanned = try('set', 'SSCAN', QUEUES, ARGV[1], 'COUNT', ARGV[2]) or {'0', {}}
local num_queues, sums, oldest = 0, {0, 0, 0, 0, 0}, ''

local function add(index, size)
  sums[index] = sums[index] + (size or 0)
end

for _, key in ipairs(scanned[2]) do
  if is_own_queue(key) and not is_known[key] then
    local queue = string.sub(key, #QUEUE_ + 1)
    num_queues = num_queues + 1
    add(1, try('list', 'LLEN', key))
    add(1, try('zset', 'ZCARD', DEFERRED_ .. queue))
    for i, prefix in ipairs({WIP_, FINISHED_, FAILED_, CANCELED_}) do add(i + 1, try('zset', 'ZCARD', prefix .. queue)) end
    local first = try('list', 'LINDEX', key, 0)
    local queued_at = first and redis.pcall('HGET', JOB_ .. first, F_ENQUEUED_AT)
    if type(queued_at) == 'string' and queued_at ~= '' and (oldest == '' or queued_at < oldest) then oldest = queued_at end
  end
end
return {scanned[1], num_queues, sums, oldest}
