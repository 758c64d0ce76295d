-- Writes that skip keys of a wrong type.
--
-- Any client can write any type to any key, and a script that fails after its first write leaves half of its work. So a
-- script checks what it cannot do without with `is_type` before its first write, and writes the rest with `try`, which
-- leaves out what cannot be written. It returns the keys that were left out, `wrong_types`, and the worker logs each with
-- the type that was expected.

local wrong_types = {}  -- {key, expected type}, ...

local function add_wrong_type(key, expected)
  for _, known in ipairs(wrong_types) do
    if known[1] == key then return end
  end
  wrong_types[#wrong_types + 1] = {key, expected}
end

-- Return the reply of a command, or nil if the key's type or value does not allow it. A Redis that refuses the command
-- (OOM, READONLY, ...) raises an error as usual.
local function try(expected, command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not (string.find(reply.err, '^WRONGTYPE') or string.find(reply.err, '^ERR')) then
    return redis.call(command, key, ...)
  end
  add_wrong_type(key, expected)
end

local SIZES = {hash = 'HLEN', list = 'LLEN', set = 'SCARD', stream = 'XLEN', string = 'STRLEN', zset = 'ZCARD'}

-- True if the key is absent or of the type.
local function is_type(key, expected)
  return try(expected, SIZES[expected], key) ~= nil
end
