-- Append the token deltas of a step to the stream that every API process reads.
--
-- KEYS  store.TOKENS
-- ARGV  max_length: entries that the stream keeps, approximately; the deltas of one step
-- The stream is neither logged on disk nor replicated, because a write to the log at every step would take longer than
-- all the rest of the step's way to the API. An API process that misses an entry finds its tokens in the job's result.
redis.set_repl(redis.REPL_NONE)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'step', ARGV[2])
