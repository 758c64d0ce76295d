"""The methods of Client for webhooks: those of AsyncWebhooks, blocking."""

from collections.abc import Sequence

from scorepool import wire
from scorepool.sdk.async_webhooks import AsyncWebhooks
from scorepool.sdk.blocking import Blocking


class Webhooks(Blocking):
    """Register endpoints, read and rotate secrets, and see what was delivered."""

    _async: AsyncWebhooks

    def register_endpoint(
        self, url: str, events: Sequence[wire.EventType] = wire.ALL_EVENTS, description: str = ""
    ) -> wire.WebhookSecret:
        """Register a webhook endpoint; return it with its secret, which no other call shows. Raises ScorepoolError."""
        return self._run(self._async.register_endpoint(url, events, description))

    def endpoints(self) -> list[wire.WebhookEndpoint]:
        """Return your webhook endpoints, oldest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.endpoints())

    def endpoint(self, endpoint_id: str) -> wire.WebhookEndpoint:
        """Return a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.endpoint(endpoint_id))

    def change_endpoint(self, endpoint_id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:
        """Change the given fields of a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.change_endpoint(endpoint_id, change))

    def delete_endpoint(self, endpoint_id: str) -> None:
        """Delete a webhook endpoint. Raises ScorepoolError, Unreachable."""
        self._run(self._async.delete_endpoint(endpoint_id))

    def rotate_endpoint_secret(self, endpoint_id: str) -> wire.WebhookSecret:
        """Give an endpoint a new secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.rotate_endpoint_secret(endpoint_id))

    def webhook_secret(self) -> wire.JobWebhookSecret:
        """Return the secret that signs what your jobs send to their `webhook`. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.webhook_secret())

    def rotate_webhook_secret(self) -> wire.JobWebhookSecret:
        """Change that secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.rotate_webhook_secret())

    def send_test_event(self, endpoint_id: str) -> wire.Delivery:
        """Send the event `webhook.test` to an endpoint. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.send_test_event(endpoint_id))

    def deliveries(
        self,
        *,
        state: wire.DeliveryState | None = None,
        endpoint_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.DeliveryPage:
        """Return a page of deliveries, newest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.deliveries(state=state, endpoint_id=endpoint_id, cursor=cursor, limit=limit))

    def delivery(self, delivery_id: str) -> wire.Delivery:
        """Return a delivery with its attempts. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.delivery(delivery_id))

    def replay_delivery(self, delivery_id: str) -> wire.Delivery:
        """Send an event again. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.replay_delivery(delivery_id))

    def replay_deliveries(self, since: float, *, endpoint_id: str | None = None) -> int:
        """Send all failed events since a time (unix, s) again; return how many. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.replay_deliveries(since, endpoint_id=endpoint_id))
