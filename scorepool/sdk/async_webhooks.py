"""The methods of AsyncClient for webhooks."""

from collections.abc import Sequence

from scorepool import wire
from scorepool.sdk import calls
from scorepool.sdk.connection import AsyncConnection


class AsyncWebhooks:
    """Register endpoints, read and rotate secrets, and see what was delivered."""

    _connection: AsyncConnection

    async def register_endpoint(
        self, url: str, events: Sequence[wire.EventType] = wire.ALL_EVENTS, description: str = ""
    ) -> wire.WebhookSecret:
        """Register a webhook endpoint; return it with its secret, which no other call shows. Raises ScorepoolError."""
        registration = wire.EndpointRegistration(url=url, events=list(events), description=description)
        return await self._connection.send(calls.register_endpoint(registration))

    async def endpoints(self) -> list[wire.WebhookEndpoint]:
        """Return your webhook endpoints, oldest first. Raises ScorepoolError, Unreachable."""
        return (await self._connection.send(calls.endpoints())).endpoints

    async def endpoint(self, endpoint_id: str) -> wire.WebhookEndpoint:
        """Return a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.endpoint(endpoint_id))

    async def change_endpoint(self, endpoint_id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:
        """Change the given fields of a webhook endpoint. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.change_endpoint(endpoint_id, change))

    async def delete_endpoint(self, endpoint_id: str) -> None:
        """Delete a webhook endpoint. Raises ScorepoolError, Unreachable."""
        await self._connection.send(calls.delete_endpoint(endpoint_id))

    async def rotate_endpoint_secret(self, endpoint_id: str) -> wire.WebhookSecret:
        """Give an endpoint a new secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.rotate_endpoint_secret(endpoint_id))

    async def webhook_secret(self) -> wire.JobWebhookSecret:
        """Return the secret that signs what your jobs send to their `webhook`. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.webhook_secret())

    async def rotate_webhook_secret(self) -> wire.JobWebhookSecret:
        """Change that secret. The previous one signs too for a while. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.rotate_webhook_secret())

    async def send_test_event(self, endpoint_id: str) -> wire.Delivery:
        """Send the event `webhook.test` to an endpoint. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.send_test_event(endpoint_id))

    async def deliveries(
        self,
        *,
        state: wire.DeliveryState | None = None,
        endpoint_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> wire.DeliveryPage:
        """Return a page of deliveries, newest first. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.deliveries(state, endpoint_id, cursor, limit))

    async def delivery(self, delivery_id: str) -> wire.Delivery:
        """Return a delivery with its attempts. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.delivery(delivery_id))

    async def replay_delivery(self, delivery_id: str) -> wire.Delivery:
        """Send an event again. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.replay_delivery(delivery_id))

    async def replay_deliveries(self, since: float, *, endpoint_id: str | None = None) -> int:
        """Send all failed events since a time (unix, s) again; return how many. Raises ScorepoolError, Unreachable."""
        return (await self._connection.send(calls.replay_deliveries(since, endpoint_id))).replayed
