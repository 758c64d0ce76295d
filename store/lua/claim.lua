-- flags: allow-oom
-- include: owner_turns.lua
-- include: memory.lua
-- include: wake.lua
-- include: speeds.lua
--
-- Lease jobs to a worker: those that wait, at most its share; if none wait, those that other workers have claimed and not
-- begun.
--
-- KEYS  list and wip registry of each queue, the first to be drained first
-- ARGV  worker, its key, lease_ms, grace_s; session of the worker and number of the claim in it;
--       max_jobs, jobs in flight of these queues, max_in_flight, '1': round robin, list length, most bytes of requests in the reply;
--       speed ('' if not measured, '-' to leave it as it is), '1': claim also more than the share,
--       if there are fewer than max_jobs, wait for a message: jobs that would begin at once, or -1: do not wait;
--       most jobs to take that others have not begun;
--       jobs in flight of the worker's other queues;
--       number of owners that get no job, their names; number of leases whose jobs have begun, their keys;
--       number of leases that the worker knows, their keys, or -1. With them, the reply holds the leases under the
--       worker's name that it does not know, because a reply or a message to it was lost.
-- Returns {rows (see lease.lua), keys of a wrong type, number of jobs that wait}, or false while
--          `rq suspend` or `POST /pause` holds.
local worker, worker_key, lease_ms, grace_s, session, number = unpack(ARGV, 1, 6)
local max_jobs, in_flight, max_in_flight, round_robin = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1'
local list_length, max_bytes, speed = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local keeps_to_share, num_startable, max_taken_over = ARGV[14] ~= '1', tonumber(ARGV[15]), tonumber(ARGV[16])
local num_elsewhere = tonumber(ARGV[17])
local num_queues = #KEYS / 2
local rows, num_bytes = {}, 0

-- A claim that the network has delivered late must lease nothing, because its worker no longer waits for the reply.
local last_claim, drains = unpack(try('hash', 'HMGET', worker_key, 'last_claim', 'drains') or {}, 1, 2)
local last_session, last_number = string.match(last_claim or '', '^(.*):(%d+)$')
if last_session == session and tonumber(last_number) >= tonumber(number) then return {rows, wrong_types, 0} end
try('hash', 'HSET', worker_key, 'last_claim', session .. ':' .. number)
redis.call('PEXPIRE', worker_key, 3 * lease_ms)  -- as a heartbeat does: the key may have expired, and the worker be dead by now

local lists, queues, usable, has_backlog = {}, {}, {}, {}
local num_waiting, num_leased, num_filled = 0, 0, 0
for i = 1, num_queues do
  lists[i] = KEYS[2 * i - 1]
  queues[i] = string.sub(lists[i], #QUEUE_ + 1)
  local num_listed, num_held, num_sharing = sizes(lists[i], KEYS[2 * i])
  usable[i], has_backlog[i] = num_listed ~= nil, num_listed ~= nil and num_sharing > 0
  if usable[i] then
    local num_in_queue = num_listed + (has_backlog[i] and try('zset', 'ZCARD', DEFERRED_ .. queues[i]) or 0)
    num_waiting = num_waiting + num_in_queue
    num_filled = num_filled + (num_in_queue > 0 and 1 or 0)
    num_leased = num_leased + num_held
  end
  if speed ~= '-' then write_speed(queues[i], worker, speed, now) end
end

local at = 18
-- Return the next list of arguments, which follows its length; nil for the length -1.
local function read_list()
  local count, list = tonumber(ARGV[at]), {}
  for i = 1, count do list[i] = ARGV[at + i] end
  at = at + 1 + math.max(0, count)
  return count >= 0 and list or nil
end

local is_excluded = {}
for _, owner in ipairs(read_list()) do is_excluded[owner] = true end

for _, lease_key in ipairs(read_list()) do
  local execution = EXECUTION_ .. lease_key
  if redis.pcall('HGET', execution, 'worker_name') == worker then redis.call('HSET', execution, 'begun', 1) end
end

local function add(row)
  rows[#rows + 1] = row
  num_bytes = num_bytes + #(row[5] or '')
end

local function new_execution()
  return string.format('%s%08x%04x', session, number, #rows)
end

local known = read_list()
if known and num_leased > #known then
  local is_known = {}
  for _, lease_key in ipairs(known) do is_known[lease_key] = true end
  for i = 1, num_queues do
    for _, lease_key in ipairs(usable[i] and redis.call('ZRANGE', KEYS[2 * i], 0, -1) or {}) do
      local id, execution = string.match(lease_key, '^([%w_-]+):(.*)$')
      if id and not is_known[lease_key] and redis.pcall('HGET', EXECUTION_ .. lease_key, 'worker_name') == worker
        and redis.pcall('HEXISTS', JOB_ .. id, F_DATA) == 1 then
        local max_concurrency = tonumber(redis.call('HGET', JOB_ .. id, F_MAX_CONCURRENCY) or '')
        max_in_flight = math.min(max_in_flight, math.max(1, max_concurrency or max_in_flight))
        add(lease(i, id, execution, KEYS[2 * i], worker, lease_ms, grace_s))
      end
    end
  end
  table.sort(rows, function(one, other) return one[3] < other[3] end)  -- execution ids count up
  in_flight, max_jobs = in_flight + #rows, math.max(0, max_jobs - #rows)
end

if is_suspended(queues[1]) then return #rows > 0 and {rows, wrong_types, 0} end
if exceeds_memory(MEMORY_FOR_CLAIMS) then max_jobs = 0 end

-- While the worker drains for a suspect of other queues (see below), these ones give it no jobs.
local drains_until, drained_queue = string.match(drains or '', '^(%S+) (.*)$')
if (tonumber(drains_until) or 0) > now then
  local is_own = false
  for i = 1, num_queues do is_own = is_own or queues[i] == drained_queue end
  if not is_own then max_jobs = 0 end
end

-- The share of a deep queue is more than any worker claims, so it need not be computed.
local num_wanted = max_jobs
if keeps_to_share and max_jobs > 0 and num_waiting > 0 then
  local num_workers = 0
  for i = 1, num_queues do num_workers = math.max(num_workers, try('hash', 'HLEN', SPEEDS_ .. queues[i]) or 0) end
  if num_workers > 1 and num_waiting < 16 * num_workers * (max_jobs + in_flight) then
    local share = share_of(worker, queues, num_waiting + num_leased, now)
    max_jobs = math.min(max_jobs, share - in_flight)
  end
end

-- A suspect (see reclaim.lua) is first in its queue. One worker at a time lets its other jobs end until it may run it; to the
-- others it is passed over, or one such job would keep all of them from claiming. Return whether this worker is that one.
local DRAINS_S = 2.5  -- since its last claim: it claims more often than that
local function drains_for_suspects(i)
  local key = DRAINING_WORKER_ .. queues[i]
  local other = try('string', 'GET', key)
  if other and other ~= worker then return false end
  redis.call('SET', key, worker, 'PX', lease_ms)
  try('hash', 'HSET', worker_key, 'drains', string.format('%.3f %s', now + DRAINS_S, queues[i]))
  try('hash', 'HDEL', worker_key, 'waits_with')  -- it may wait for jobs of its other queues
  return true
end

local num_passed_over = 0

-- Lease a job. Return 'leased'; 'full' if no more jobs may join those in flight; 'passed' if only this one may not.
local function lease_job(i, id, max_concurrency)
  local allowed = math.min(max_in_flight, math.max(1, max_concurrency or max_in_flight))
  local num_running = in_flight + num_elsewhere
  if num_running >= allowed then
    local is_passed = max_concurrency and not drains_for_suspects(i) and num_running < max_in_flight
    num_passed_over = num_passed_over + (is_passed and 1 or 0)
    return is_passed and 'passed' or 'full'
  end
  max_in_flight = allowed
  in_flight = in_flight + 1
  add(take(i, KEYS[2 * i - 1], KEYS[2 * i], id, new_execution(), worker, lease_ms, grace_s))
  return 'leased'
end

local num_passed = {}  -- of each queue: the first jobs of its list, which were passed over
for i = 1, num_queues do num_passed[i] = 0 end

-- Lease the next job of a queue. Return 'leased', 'full' or 'empty'.
local function lease_next(i)
  while usable[i] do
    local id, max_concurrency = head(KEYS[2 * i - 1], list_length, num_passed[i])
    if not id then break end
    local found = lease_job(i, id, max_concurrency)
    if found ~= 'passed' then return found end
    num_passed[i] = num_passed[i] + 1
  end
  return 'empty'
end

local num_before = #rows
local function has_room() return #rows - num_before < max_jobs and num_bytes < max_bytes end

local function claim_by_queue()
  local index, num_empty = 1, 0
  while num_waiting > 0 and has_room() and num_empty < num_queues do
    local found = lease_next(index)
    if found == 'full' then return end
    if found == 'empty' then num_empty = num_empty + 1 else num_empty = 0 end
    if round_robin or found == 'empty' then index = index % num_queues + 1 end
  end
end

local function claim_by_owner(owners)
  local next_job, serve, pass_over = owner_turns(owners, lists)
  while has_room() do
    local i, id, max_concurrency = next_job()
    local found = id and lease_job(i, id, max_concurrency) or 'full'
    if found == 'full' then return end
    if found == 'leased' then serve() else pass_over() end
  end
end

-- Return the owners among whose jobs to choose; nil if the order of the queues decides.
local function find_choices()
  local has_excluded = next(is_excluded) ~= nil
  if not has_excluded and (num_filled < 2 or round_robin) then return nil end
  local owners, choices = find_owners(lists, usable, list_length), {}
  for _, owner in ipairs(owners) do
    if not is_excluded[owner.name] then choices[#choices + 1] = owner end
  end
  return (has_excluded or #owners > 1) and choices or nil
end

if num_waiting > 0 and max_jobs > 0 then
  local choices = find_choices()
  if choices then claim_by_owner(choices) else claim_by_queue() end
end
num_waiting = math.max(0, num_waiting - (#rows - num_before) - num_passed_over)  -- those passed over wait for another worker

for i = 1, num_queues do
  if has_backlog[i] then top_up(KEYS[2 * i - 1], list_length) end
end

-- Take jobs that other workers have claimed and not begun, the last ones first: their workers begin with the others. A job
-- changes its worker in this way once, so that slow workers do not pass it back and forth. Workers of older versions do not
-- report what they have begun, and leave no `begun` in the lease.
local UNBEGUN_S = 0.5  -- until a worker has had time to report that it has begun the job
local MAX_SEEN = 500
local MANY_SEEN, AGAIN_MS = 100, 250  -- after so many leases have been seen in vain, nobody looks for so long
local function take_over()
  local unbegun, num_seen = {}, 0
  if redis.call('EXISTS', NOTHING_UNBEGUN_ .. queues[1]) == 1 then return end
  for i = 1, num_queues do
    for _, lease_key in ipairs(usable[i] and redis.call('ZREVRANGE', KEYS[2 * i], 0, MAX_SEEN - 1) or {}) do
      num_seen = num_seen + 1
      local id, execution = string.match(lease_key, '^([%w_-]+):(.*)$')
      local holder, begun, since = unpack(redis.pcall('HMGET', EXECUTION_ .. lease_key, 'worker_name', 'begun', 'created_at'), 1, 3)
      since = tonumber(since or '') or now
      if id and holder and holder ~= worker and begun == '0' and since <= now - UNBEGUN_S
        and redis.pcall('HEXISTS', JOB_ .. id, F_KIND) == 1 and not redis.call('HGET', JOB_ .. id, F_MAX_CONCURRENCY) then
        unbegun[#unbegun + 1] = {index = i, id = id, execution = execution, holder = holder, since = since}
      end
    end
  end
  if #unbegun == 0 and num_seen >= MANY_SEEN then
    redis.call('SET', NOTHING_UNBEGUN_ .. queues[1], '', 'PX', AGAIN_MS)
  end
  table.sort(unbegun, function(one, other)
    if one.since ~= other.since then return one.since > other.since end
    return one.execution > other.execution  -- execution ids count up
  end)
  for i = 1, math.min(#unbegun, max_jobs, max_taken_over) do
    local found = unbegun[i]
    local wip = KEYS[2 * found.index]
    end_lease(found.id, found.execution, wip)
    in_flight = in_flight + 1
    add(lease(found.index, found.id, new_execution(), wip, worker, lease_ms, grace_s))
    redis.call('HSET', EXECUTION_ .. found.id .. ':' .. rows[#rows][3], 'begun', 1)
    redis.call('PUBLISH', WAKE_ .. found.holder, pack({'taken', found.id .. ':' .. found.execution}))
  end
end
if max_taken_over > 0 and #rows == 0 and num_waiting == 0 and num_leased > in_flight
  and in_flight + num_elsewhere < max_in_flight then take_over() end

-- A worker that begins jobs at once is offered no others: it waits behind those that do when it has claimed again.
local MAX_HANDED_OUT = 4  -- jobs that are sent to a worker before it claims again, because it may have fallen asleep
local waits, is_full = num_startable >= 0, num_startable <= #rows
local num_offered = math.min(MAX_HANDED_OUT, num_wanted - (#rows - num_before), max_in_flight - in_flight - num_elsewhere)
if not is_full then num_offered = math.min(num_offered, num_startable - #rows) end
local is_waiting = waits and num_waiting == 0 and num_offered > 0
wait(worker, queues, is_waiting and rank_of(sane(speed_of(queues[1], worker)) or 0, is_full))
if is_waiting then
  local offer = {lease_ms, grace_s, string.format('%s%08x', session, number), num_offered}
  try('hash', 'HSET', worker_key, 'waits_with', table.concat(offer, ' '))
elseif in_flight + num_elsewhere >= max_in_flight then
  try('hash', 'HDEL', worker_key, 'waits_with')  -- it may wait for jobs of its other queues, and must have none now
end

if #rows > 0 then
  try('hash', 'HSET', worker_key, 'state', 'busy', 'current_job', rows[#rows][2])
end
return {rows, wrong_types, num_waiting}
