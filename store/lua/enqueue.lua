-- include: push_job.lua
--
-- Queue a job that RQ's own methods have saved.
--
-- ARGV  queue, id, delay in seconds, '1': at the front
-- Returns the keys of a wrong type.
push_job(ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1')
return wrong_types
