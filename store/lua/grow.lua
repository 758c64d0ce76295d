-- Add a step's tokens to the stream that every API process reads.
--
-- KEYS  wire.TOKENS
-- ARGV  about how many steps the stream is to hold, the step
-- Neither the log on disk nor a replica gets it: a write to the log at every step would cost more than the step's whole
-- way to the API, and whoever misses a step has the job's result, which holds all of them again.
redis.set_repl(redis.REPL_NONE)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'step', ARGV[2])
