"""What an operator watches of the queue, read from Redis at each scrape. Labels are models that live workers serve."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.repositories import decode as stored

UNSERVED = "(unserved)"  # stands for every queue whose model no worker serves now
REGISTRIES = {"started": "wip", "finished": "finished", "failed": "failed", "canceled": "canceled"}
DELIVERY_STATES = {"started": "wip", "waiting": "scheduled", "delivered": "finished", "failed": "failed"}
OUTCOMES = ("result", *get_args(wire.FailureCode))


class QueueSnapshot:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"scorepool_{name}", text, labels, registry=registry)

        self.jobs = gauge("queue_jobs", "Jobs in Redis, by queue and state.", "queue", "state")
        self.oldest = gauge("queue_oldest_seconds", "How long the first job of the queue has waited.", "queue")
        self.workers = gauge("workers", "Live workers, by what they serve.", "model")
        self.heartbeat = gauge(
            "worker_heartbeat_age_seconds", "Of the worker heard of longest ago, by what it serves.", "model"
        )
        self.deliveries = gauge("webhook_deliveries", "Deliveries in Redis, by state.", "state")
        self.outcomes = Outcomes()
        registry.register(self.outcomes)

    def forget(self) -> None:
        """Redis is away: what it said before is no reading."""
        for gauge in (self.jobs, self.oldest, self.workers, self.heartbeat, self.deliveries):
            gauge.clear()

    async def read(self, redis: Redis, cards: Sequence[wire.ServedModel]) -> None:
        """Raises RedisError."""
        models = sorted({card.id for card in cards})
        served = {queue for model in models for queue in store.queue_names(model)} | {store.WEBHOOKS}
        keys: Any = await redis.smembers("rq:queues")
        queues = sorted({stored.text(key).removeprefix("rq:queue:") for key in keys} | served)
        labels = [queue if queue in served else UNSERVED for queue in queues]
        self.forget()
        await self._read_sizes(redis, queues, labels)
        await self._read_oldest(redis, queues, labels)
        await self._read_workers(redis, models)
        await self._read_deliveries(redis)
        counts: Any = await redis.hgetall(store.Keys.outcomes)
        self.outcomes.counts = {code: stored.number(counts.get(code.encode())) for code in OUTCOMES}

    async def _read_sizes(self, redis: Redis, queues: Sequence[str], labels: Sequence[str]) -> None:
        """Depths and registry sizes of every queue; those of models without a worker are added up."""
        async with redis.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.llen(f"rq:queue:{queue}")
                pipeline.zcard(f"rq:deferred:{queue}")
                for registry in REGISTRIES.values():
                    pipeline.zcard(f"rq:{registry}:{queue}")
            sizes = (size or 0 for size in await stored.replies(pipeline))
        for label in labels:
            self.jobs.labels(label, "queued").inc(next(sizes) + next(sizes))
            for state in REGISTRIES:
                self.jobs.labels(label, state).inc(next(sizes))

    async def _read_oldest(self, redis: Redis, queues: Sequence[str], labels: Sequence[str]) -> None:
        async with redis.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.lindex(f"rq:queue:{queue}", 0)
            heads = await stored.replies(pipeline)
            for head in heads:
                pipeline.hget(b"rq:job:" + (head or b""), "enqueued_at")
            times = await stored.replies(pipeline)
        ages_s = dict.fromkeys(labels, 0.0)
        for label, enqueued_at in zip(labels, times, strict=True):
            ages_s[label] = max(ages_s[label], _age_s(enqueued_at))
        for label, age_s in ages_s.items():
            self.oldest.labels(label).set(age_s)

    async def _read_workers(self, redis: Redis, models: Sequence[str]) -> None:
        served = [*models, store.WEBHOOKS]
        async with redis.pipeline(transaction=False) as pipeline:
            for name in served:
                pipeline.smembers(f"rq:workers:{name}")
            members = [keys or () for keys in await stored.replies(pipeline)]
            for keys in members:
                for key in keys:
                    pipeline.hget(key, "last_heartbeat")
            beats = iter(await stored.replies(pipeline))
        for name, keys in zip(served, members, strict=True):
            ages_s = [_age_s(beat) for beat in (next(beats) for _ in keys) if beat]  # a worker that died has none
            self.workers.labels(name).set(len(ages_s))
            if ages_s:
                self.heartbeat.labels(name).set(max(ages_s))

    async def _read_deliveries(self, redis: Redis) -> None:
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.llen(f"rq:queue:{store.WEBHOOKS}")
            for registry in DELIVERY_STATES.values():
                pipeline.zcard(f"rq:{registry}:{store.WEBHOOKS}")
            sizes = await stored.replies(pipeline)
        for state, size in zip(("queued", *DELIVERY_STATES), sizes, strict=True):
            self.deliveries.labels(state).set(size or 0)


class Outcomes(Collector):
    """A counter that Redis keeps, for all processes together."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("scorepool_outcomes", "Jobs that ended, by result or failure.", labels=["code"])
        for code, count in self.counts.items():
            family.add_metric([code], count)
        yield family


def _age_s(time_: bytes | None) -> float:
    """0.0 without a time that can be read: no record may end the readings."""
    since = stored.moment_s(time_)
    return 0.0 if since is None else max(0.0, time.time() - since)


assert {"queued", *REGISTRIES} == set(get_args(wire.Status))
