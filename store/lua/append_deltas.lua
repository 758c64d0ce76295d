-- Append the token deltas of a worker, and the progress of its jobs, to the stream that every API process reads.
--
-- KEYS  store.TOKENS, Keys.missing_tokens
-- ARGV  max_length: entries that the stream keeps, approximately; wire.Progresses, or '' for none; wire.TokenDeltas
--       without a delta, for readers that know no progress; number of entries; the entries; the ids of the jobs whose
--       deltas the worker can repeat
-- Returns the wire.MissingTokens of these jobs, which the worker then writes again.
--
-- The stream is neither logged on disk nor replicated, because a write to the log at every step would take longer than
-- all the rest of the step's way to the API. So a restart of Redis loses deltas that were written.
redis.set_repl(redis.REPL_NONE)
if ARGV[2] ~= '' then
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'step', ARGV[3], 'progress', ARGV[2])
end
local num_entries = tonumber(ARGV[4])
for i = 5, 4 + num_entries do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'step', ARGV[i])
end
local found = redis.pcall('SMEMBERS', KEYS[2])
if #found == 0 then return {} end  -- nothing is missing, or the key has a wrong type

local is_own = {}
for i = 5 + num_entries, #ARGV do is_own[ARGV[i]] = true end
local missing = {}
for _, body in ipairs(found) do
  local is_decoded, tokens = pcall(cmsgpack.unpack, body)
  if is_decoded and type(tokens) == 'table' and is_own[tokens.id] then
    missing[#missing + 1] = body
    redis.call('SREM', KEYS[2], body)
  end
end
return missing
