-- The execution whose result is in the result store, if Redis holds only a wire.StoredResult of the job's end; else nil.
local function stored_execution(id)
  local size = redis.pcall('STRLEN', OUTCOME_ .. id)
  if type(size) ~= 'number' or size == 0 or size > MAX_RECORD_BYTES then return nil end
  local is_read, outcome = pcall(cmsgpack.unpack, redis.call('GET', OUTCOME_ .. id))
  if is_read and type(outcome) == 'table' and outcome.type == 'stored' then return outcome.execution end
end
