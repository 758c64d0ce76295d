-- Tell the owner's endpoints that a batch has ended. Put wire.OUTBOX before it.
--
-- ARGV  id of the batch, owner, event, now (ISO), seconds that a delivery is kept
local id, owner, event, iso, ttl_s = unpack(ARGV)
for _, text in ipairs(redis.call('HVALS', ENDPOINTS .. owner)) do
  local is_read, endpoint = pcall(wants, text, event)  -- a text that cannot be read must not keep a batch from ending
  if is_read and endpoint then
    local delivery = 'wh_' .. string.gsub(id, '^batch_', '') .. '_' .. endpoint
    deliver(delivery, owner, tonumber(ttl_s), iso, {event = event, batch = id, endpoint = endpoint, at = iso})
  end
end
