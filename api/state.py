"""Build what one API process holds: its connections to Redis and the parts that use them.

Routes never get this object: `dependencies.py` hands each route the parts that it names in its signature.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

from scorepool.api.admission import Admission
from scorepool.api.auth import Keyring
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
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.readiness import Readiness
from scorepool.api.repositories.sessions import Sessions
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.api.repositories.webhook_secrets import WebhookSecrets
from scorepool.api.repositories.weights import Weights
from scorepool.api.server import Server
from scorepool.api.shared import Shared
from scorepool.api.spread.copies import Copies
from scorepool.api.spread.stranded_jobs import StrandedJobs
from scorepool.api.streaming import Streaming
from scorepool.api.submission import Submission
from scorepool.store import LOCAL_OWNER, ServerMap, Settings
from scorepool.store.result_store import open_result_store
from scorepool.store.traces import Tracer, open_tracer

LAST_READS_S = 0.05  # for clients that were answered as the server stops: each reads its job once more


@dataclass(frozen=True)
class State:
    """Hold the parts of one API process."""

    settings: Settings
    keyring: Keyring
    servers: ServerMap
    parts: list[Server]  # of each server, home first
    copies: Copies | None  # of webhook endpoints, if there are several servers
    stranded_jobs: StrandedJobs | None  # the same
    reach: Reach
    waiting: Waiting
    readiness: Readiness
    metrics: Metrics
    snapshots: QueueSnapshots
    history: History
    # repositories
    models: Models
    adapters: Adapters
    jobs: Jobs
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
        keyring, servers = Keyring.load(settings), ServerMap.load(settings)
        result_store = open_result_store(settings)
        parts = [Server.create(each, settings, keyring, result_store) for each in servers.servers]
        home, copies = parts[0].redis, [part.redis for part in parts[1:]]
        metrics = Metrics()
        readers = [part.reader for part in parts]
        waiting = Waiting(readers, metrics.ended.inc, None if servers.is_one else servers.of_job)
        reach = Reach(servers, readers)
        shared = Shared.create(servers, parts, reach)
        models, jobs, queue = shared.models, shared.jobs, shared.queue
        quota = Quota.load(settings, keyring.has_several_owners)
        endpoints = WebhookEndpoints(home, settings, quota.max_bytes, copies)
        webhook_secrets = WebhookSecrets(home, settings, copies)
        admission = Admission(settings, shared.now_s, models, endpoints, servers)
        tracer = open_tracer(settings, "api")
        images = FetchedImages(settings)
        submission = Submission(settings, admission, models, queue, jobs, waiting, metrics, images, tracer)

        def redis_of(model: str) -> Redis:
            return parts[servers.of_model(model)].redis

        return cls(
            settings=settings,
            keyring=keyring,
            servers=servers,
            parts=parts,
            copies=Copies(keyring.owners or [LOCAL_OWNER], endpoints, webhook_secrets) if copies else None,
            stranded_jobs=StrandedJobs(servers, [part.redis for part in parts], reach) if copies else None,
            reach=reach,
            waiting=waiting,
            readiness=Readiness(servers, [part.redis for part in parts], readers),
            metrics=metrics,
            snapshots=shared.snapshots,
            history=History(home, shared.snapshots, models),
            models=models,
            adapters=Adapters(redis_of, models),
            jobs=jobs,
            queue=queue,
            endpoints=endpoints,
            webhook_secrets=webhook_secrets,
            deliveries=shared.deliveries,
            files=Files(home, settings, quota),
            batches=Batches(home, quota, settings.max_batches_per_key),
            sessions=Sessions(home),
            weights=Weights(redis_of),
            pause=Pause(home, *copies),
            admission=admission,
            images=images,
            submission=submission,
            streaming=Streaming(submission, waiting, metrics),
            tracer=tracer,
        )

    @property
    def redis_servers(self) -> list[Redis]:
        """The connections to all servers, home first."""
        return [part.redis for part in self.parts]

    @property
    def stored_results(self) -> StoredResults:
        """What reads results from the result store, of whichever server."""
        return self.parts[0].stored_results

    def start(self) -> None:
        """Start the tasks."""
        self.waiting.start()
        self.history.start()
        for part in self.parts:
            part.stored_results.start()
        if self.copies is not None and self.stranded_jobs is not None:
            self.copies.start()
            self.stranded_jobs.start()

    async def close(self) -> None:
        """Answer waiting clients and close the connections to Redis."""
        num_waiting = len(self.waiting)
        await self.waiting.close()
        await self.images.close()
        if num_waiting:
            await asyncio.sleep(LAST_READS_S)
        await self.history.close()
        if self.copies is not None and self.stranded_jobs is not None:
            await self.copies.close()
            await self.stranded_jobs.close()
        await self.snapshots.close()
        await self.models.close()
        for part in self.parts:
            await part.stored_results.close()
            await part.stream_redis.aclose()
            await part.redis.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
