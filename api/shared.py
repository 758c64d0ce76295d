"""Build the repositories of what is spread over the servers: those of the only server, or parts that know all."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from scorepool.api.metrics.queue_snapshot import QueueSnapshots
from scorepool.api.repositories import decode
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.server import Server
from scorepool.api.spread.spread_deliveries import SpreadDeliveries
from scorepool.api.spread.spread_jobs import SpreadJobs
from scorepool.api.spread.spread_models import SpreadModels
from scorepool.api.spread.spread_queue import SpreadQueue
from scorepool.api.spread.spread_snapshots import SpreadSnapshots
from scorepool.store import ServerMap


@dataclass(frozen=True)
class Shared:
    """Hold these parts."""

    models: Models
    jobs: Jobs
    queue: Queue
    deliveries: WebhookDeliveries
    snapshots: QueueSnapshots
    now_s: Callable[[], Awaitable[float]]  # the unix time by Redis's clock

    @classmethod
    def create(cls, servers: ServerMap, parts: Sequence[Server], reach: Reach) -> Self:
        """Build them."""
        if servers.is_one:
            [one] = parts
            snapshots = QueueSnapshots(one.redis, one.models)
            return cls(one.models, one.jobs, one.queue, one.deliveries, snapshots, partial(decode.now_s, one.redis))
        models = SpreadModels(servers, [part.models for part in parts], reach)
        return cls(
            models=models,
            jobs=SpreadJobs(servers, [part.jobs for part in parts], reach),
            queue=SpreadQueue(servers, [part.queue for part in parts], models, reach),
            deliveries=SpreadDeliveries(servers, [part.deliveries for part in parts], reach),
            snapshots=SpreadSnapshots(servers, [part.redis for part in parts], models, reach),
            now_s=models.now_s,
        )
