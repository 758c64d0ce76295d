"""Build what one API process holds: its connections to Redis and the parts that use them.

Routes never get this object: `dependencies.py` hands each route the parts that it names in its signature.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

from scorepool.api.admission import Admission
from scorepool.api.auth import Keyring
from scorepool.api.connection import REDIS_TIMEOUT_S, connect
from scorepool.api.images.fetched_images import FetchedImages
from scorepool.api.metrics.history import History
from scorepool.api.metrics.prometheus import Metrics
from scorepool.api.metrics.queue_snapshot import QueueSnapshots
from scorepool.api.repositories.adapters import Adapters
from scorepool.api.repositories.batches import Batches
from scorepool.api.repositories.files import Files
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.pause import Pause
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.quota import Quota
from scorepool.api.repositories.sessions import Sessions
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.api.repositories.waiting import BLOCK_S, Waiting
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.api.repositories.webhook_secrets import WebhookSecrets
from scorepool.api.repositories.weights import Weights
from scorepool.api.streaming import Streaming
from scorepool.api.submission import Submission
from scorepool.store import Settings
from scorepool.store.result_store import open_result_store
from scorepool.store.traces import Tracer, open_tracer

MAX_CONNECTIONS = 64
LAST_READS_S = 0.05  # for clients that were answered as the server stops: each reads its job once more


@dataclass(frozen=True)
class State:
    """Hold the parts of one API process."""

    settings: Settings
    keyring: Keyring
    redis: Redis
    stream_redis: Redis  # for the one blocking read
    waiting: Waiting
    metrics: Metrics
    snapshots: QueueSnapshots
    history: History
    # repositories
    models: Models
    adapters: Adapters
    jobs: Jobs
    stored_results: StoredResults
    queue: Queue
    endpoints: WebhookEndpoints
    webhook_secrets: WebhookSecrets
    deliveries: WebhookDeliveries
    files: Files
    batches: Batches
    sessions: Sessions
    weights: Weights
    pause: Pause
    # what routes do with them
    admission: Admission
    images: FetchedImages
    submission: Submission
    streaming: Streaming
    tracer: Tracer | None

    @classmethod
    def create(cls, settings: Settings) -> Self:
        """Build all parts without connecting to Redis. Raises SettingsError."""
        redis = connect(settings.redis_url, REDIS_TIMEOUT_S, MAX_CONNECTIONS)
        stream_redis = connect(settings.redis_url, BLOCK_S + REDIS_TIMEOUT_S, 1)
        keyring = Keyring.load(settings)
        metrics = Metrics()
        waiting = Waiting(stream_redis.client(), redis, on_ended=metrics.ended.inc)
        stored_results = StoredResults(redis, open_result_store(settings))
        models, jobs = Models(redis), Jobs(redis, stored_results)
        queue = Queue(redis, settings, keyring.weight, keyring.has_several_owners)
        quota = Quota.load(settings, keyring.has_several_owners)
        endpoints = WebhookEndpoints(redis, settings, quota.max_bytes)
        admission = Admission(settings, redis, models, endpoints)
        snapshots = QueueSnapshots(redis, models)
        tracer = open_tracer(settings, "api")
        images = FetchedImages(settings)
        submission = Submission(settings, admission, models, queue, jobs, waiting, metrics, images, tracer)
        return cls(
            settings=settings,
            keyring=keyring,
            redis=redis,
            stream_redis=stream_redis,
            waiting=waiting,
            metrics=metrics,
            snapshots=snapshots,
            history=History(redis, snapshots, models),
            models=models,
            adapters=Adapters(redis, models),
            jobs=jobs,
            stored_results=stored_results,
            queue=queue,
            endpoints=endpoints,
            webhook_secrets=WebhookSecrets(redis, settings),
            deliveries=WebhookDeliveries(redis, settings),
            files=Files(redis, settings, quota),
            batches=Batches(redis, quota, settings.max_batches_per_key),
            sessions=Sessions(redis),
            weights=Weights(redis),
            pause=Pause(redis),
            admission=admission,
            images=images,
            submission=submission,
            streaming=Streaming(submission, waiting, metrics),
            tracer=tracer,
        )

    async def close(self) -> None:
        """Answer waiting clients and close the connections to Redis."""
        num_waiting = len(self.waiting)
        await self.waiting.close()
        await self.images.close()
        if num_waiting:
            await asyncio.sleep(LAST_READS_S)
        await self.history.close()
        await self.stored_results.close()
        await self.snapshots.close()
        await self.models.close()
        await self.stream_redis.aclose()
        await self.redis.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
