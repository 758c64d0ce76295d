-- include: outbox.lua
--
-- Send a test event to an endpoint.
--
-- ARGV  id of the delivery, owner, endpoint's id, seconds that the delivery is kept
create_delivery(ARGV[1], ARGV[2], tonumber(ARGV[4]), {[F_EVENT] = 'webhook.test', [F_ENDPOINT] = ARGV[3], [F_EVENT_AT] = iso_now})
