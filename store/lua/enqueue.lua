-- flags: allow-oom
-- include: clock.lua
-- include: push_job.lua
--
-- Queue a job that RQ's own methods have saved.
--
-- ARGV  queue, id, delay in seconds, '1': at the front
-- Returns the keys of a wrong type.
local queue, id, delay_s, is_at_front = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
push_job(queue, id, delay_s, is_at_front)
if delay_s == 0 then try('hash', 'HSET', JOB_ .. id, F_ENQUEUED_AT, iso_now) end  -- RQ wrote the time of its caller's clock
return wrong_types
