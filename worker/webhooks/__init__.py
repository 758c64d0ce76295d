"""Deliver webhook events: an `rq worker` that claims deliveries and POSTs them. Knows no engine and loads none."""
