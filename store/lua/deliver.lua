-- Send a test event to an endpoint. Put wire.OUTBOX before it.
--
-- ARGV  id of the delivery, owner, endpoint's id, now (ISO), seconds that the delivery is kept

deliver(ARGV[1], ARGV[2], tonumber(ARGV[5]), ARGV[4], {event = 'webhook.test', endpoint = ARGV[3], at = ARGV[4]})
