-- flags: allow-oom
-- include: outbox.lua
--
-- Report the end of a batch to the endpoints of its owner that subscribe to the event.
--
-- ARGV  id of the batch, owner, event, seconds that a delivery is kept
local id, owner, event, ttl_s = unpack(ARGV)
for _, text in ipairs(try('hash', 'HVALS', ENDPOINTS_OF_ .. owner) or {}) do
  local is_read, endpoint = pcall(subscribed_endpoint, text, event)  -- a text that cannot be read must not keep a batch from ending
  if is_read and endpoint then
    local delivery = DELIVERY_ID_ .. string.gsub(id, '^batch_', '') .. '_' .. endpoint
    create_delivery(delivery, owner, tonumber(ttl_s),
      {[F_EVENT] = event, [F_BATCH] = id, [F_ENDPOINT] = endpoint, [F_EVENT_AT] = iso_now})
  end
end
