-- Add a step's tokens to the stream that every API process reads.
--
-- KEYS  wire.TOKENS
-- ARGV  about how many steps the stream is to hold, the step
-- The stream is neither logged on disk nor replicated: a log write at every step would take longer than the step's whole
-- way to the API. An API process that misses a step gets its tokens from the job's result, which holds all of them.
redis.set_repl(redis.REPL_NONE)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'step', ARGV[2])
