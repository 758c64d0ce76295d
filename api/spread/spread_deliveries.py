"""Read and replay webhook deliveries on the servers whose jobs they report."""

from collections.abc import Sequence

from scorepool import wire
from scorepool.api.repositories.pages import merge_pages
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.spread.parts import Parts
from scorepool.store import ServerMap
from scorepool.store.keys import Keys
from scorepool.store.server_map import HOME


class SpreadDeliveries(WebhookDeliveries):
    """The deliveries of all servers. Those of batches and tests are on home."""

    def __init__(self, servers: ServerMap, parts: Sequence[WebhookDeliveries], reach: Reach) -> None:
        self._parts = Parts(servers, parts, reach)

    async def read(self, owner: str, delivery_id: str) -> wire.Delivery:
        return await self._parts.find(_job_id(delivery_id), lambda one: one.read(owner, delivery_id))

    async def find(
        self, owner: str, state: wire.DeliveryState | None, endpoint_id: str | None, cursor: str | None, limit: int
    ) -> tuple[list[tuple[float, wire.Delivery]], str | None]:
        pages = await self._parts.on_all(lambda one: one.find(owner, state, endpoint_id, cursor, limit))
        return merge_pages(pages, limit, lambda row: row[0])

    async def replay(self, owner: str, delivery_id: str) -> wire.Delivery:
        return await self._parts.find(_job_id(delivery_id), lambda one: one.replay(owner, delivery_id))

    async def replay_failed(self, owner: str, replay: wire.ReplayRequest) -> int:
        return sum(await self._parts.on_all(lambda one: one.replay_failed(owner, replay)))

    async def test(self, owner: str, endpoint: wire.WebhookEndpoint) -> wire.Delivery:
        return await self._parts.on(HOME, lambda one: one.test(owner, endpoint))


def _job_id(delivery_id: str) -> str:
    """Return the job's id in that of a delivery: wh_ID, and more after it."""
    return delivery_id.removeprefix(Keys.delivery(""))[:32]
