-- include: wrong_types.lua
--
-- Lists of the files and the batches of an owner: sorted sets of ids by time of creation, which api/repositories/pages.py reads.

-- List an item for at least `ttl_s`. The list expires with the item that is kept longest.
local function add_to_list(list, id, created_at, ttl_s)
  try('zset', 'EXPIRE', list, LIST_KEPT_S, 'NX')  -- a list of the previous release, which set no expiry
  try('zset', 'ZADD', list, 'NX', created_at, id)
  try('zset', 'ZREMRANGEBYSCORE', list, '-inf', created_at - LIST_KEPT_S)
  try('zset', 'EXPIRE', list, ttl_s, 'NX')  -- GT leaves a key without an expiry alone
  try('zset', 'EXPIRE', list, ttl_s, 'GT')
end
