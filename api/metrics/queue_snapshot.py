"""Read what an operator watches of the queue, once, as plain data. Knows no Prometheus."""

from collections.abc import Sequence
from typing import Any, Self, get_args

from msgspec import Struct
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.repositories import decode
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.shared_read import SharedRead
from scorepool.store.clock import clock_s
from scorepool.store.scripts import load

UNSERVED = "(unserved)"  # stands for all queues whose model no live worker serves
FRESH_S = 3.0  # how long a snapshot is used again
COUNT_AT_ONCE = 200  # unserved queues in one script, which takes Redis about a millisecond
MAX_UNSERVED = 5000  # unserved queues whose jobs are counted; the settings allow fewer
REGISTRIES = {"started": "wip", "finished": "finished", "failed": "failed", "canceled": "canceled"}
DELIVERY_STATES = {"started": "wip", "waiting": "scheduled", "delivered": "finished", "failed": "failed"}
PREFIX_TIERS, PREFIX_EVENTS = ("memory", "disk"), ("hits", "misses", "evictions")
CHECKPOINT_ROWS = ("saved", "restored", "dropped")
PREFIX_SOURCES = ("cache", "computed")
CROSSCHECK_OUTCOMES = ("agreed", "differed", "stopped")
OUTCOMES = ("result", *get_args(wire.FailureCode))


CACHE_USES = {"hits": "hit", "misses": "miss", "shared": "shared"}


class ResultCacheState(Struct, frozen=True, kw_only=True):
    """Hold how full the result cache is, and how it was used since the counters began."""

    uses: dict[str, int] = {}  # sequences, by what they found
    evictions: int = 0
    refused: int = 0  # entries that were not written, because Redis had too little memory
    entries: int = 0
    bytes: int = 0

    @classmethod
    async def read(cls, redis: Redis) -> Self:
        """Read the state. Raises RedisError."""
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(store.Keys.result_cache_counts)
            pipeline.zcard(store.Keys.result_cache_uses)
            pipeline.hget(store.Keys.result_cache, "bytes")
            counts, entries, size_bytes = await decode.execute(pipeline)
        counts = counts or {}
        return cls(
            uses={name: decode.number(counts.get(field.encode())) for field, name in CACHE_USES.items()},
            evictions=decode.number(counts.get(b"evictions")),
            refused=decode.number(counts.get(b"refused")),
            entries=entries or 0,
            bytes=decode.number(size_bytes),
        )


class LiveWorker(Struct, frozen=True):
    """Name what a live worker serves, and what RQ's registration says of it."""

    served: wire.ServedModel
    host: str  # empty if it has just left
    heartbeat_age_s: float | None


class QueueSnapshot(Struct, frozen=True, kw_only=True):
    """Hold the state of queues, workers and deliveries at one moment. Only queues with a live worker are named."""

    jobs: dict[str, dict[str, int]]  # by queue and status
    oldest_s: dict[str, float]  # by queue: how long its first job has waited
    workers: dict[str, int]  # live ones, by model
    heartbeat_age_s: dict[str, float]  # of the worker with the oldest heartbeat, by model
    stopped: dict[str, int]  # live workers that a crosscheck has stopped, by model
    links: dict[str, list[wire.WorkerLink]]  # what live workers measure, by model
    live: list[LiveWorker]  # by host, model and name
    crosschecks: dict[str, int]  # by outcome
    deliveries: dict[str, int]  # by state
    outcomes: dict[str, int]  # jobs that ended, by `result` or the failure's code
    prefix_tokens: dict[str, int] = {}  # given tokens, by whether a shared prefix had them or they were computed
    result_cache: ResultCacheState = ResultCacheState()
    prefix_events: dict[tuple[str, str], int] = {}  # by tier and event
    checkpoint_rows: dict[str, int] = {}  # finished rows of running jobs, by what became of them
    latency_ms: int = 0  # from submission to result, the sum of all that have one
    unreachable: list[str] = []  # settings of the servers that did not answer and are left out

    @property
    def engines(self) -> dict[tuple[str, str], list[wire.EngineLoad]]:
        """What the engines of live workers show, by model and host."""
        engines: dict[tuple[str, str], list[wire.EngineLoad]] = {}
        for worker in self.live:
            if worker.served.load is not None:
                engines.setdefault((worker.served.id, worker.host), []).append(worker.served.load)
        return engines

    @property
    def weights_versions(self) -> dict[str, int]:
        """The least version of the weights that a live worker serves, by model."""
        least: dict[str, int] = {}
        for worker in self.live:
            model, version = worker.served.id, worker.served.stamp.weights_version
            if version is not None:
                least[model] = min(version, least.get(model, version))
        return least

    @classmethod
    async def read(cls, redis: Redis, live: Sequence[wire.ServedModel]) -> Self:
        """Read the snapshot. `live` is what live workers serve. Raises RedisError."""
        models = sorted({model.id for model in live})
        served = {queue for model in models for queue in store.queue_names(model)} | {store.WEBHOOKS}
        queues = sorted(served)
        now = await decode.now_s(redis)
        workers, heartbeat_age_s = await _read_workers(redis, [*models, store.WEBHOOKS], now)
        counts: Any = await redis.hgetall(store.Keys.outcome_counts)
        checks: Any = await redis.hgetall(store.Keys.crosscheck_counts)
        prefixes: Any = await redis.hgetall(store.Keys.prefix_tokens)
        checkpoints: Any = await redis.hgetall(store.Keys.checkpoint_counts)
        events: Any = await redis.hgetall(store.Keys.prefix_events)
        jobs_unserved, oldest_unserved_s = await _read_unserved(redis, queues, now)
        return cls(
            jobs=await _read_jobs(redis, queues) | jobs_unserved,
            oldest_s=await _read_oldest(redis, queues, now) | oldest_unserved_s,
            workers=workers,
            heartbeat_age_s=heartbeat_age_s,
            stopped={model: sum(one.id == model and not one.takes_jobs for one in live) for model in models},
            links={model: [one.link for one in live if one.id == model and one.link] for model in models},
            live=await _read_live(redis, live, now),
            crosschecks={outcome: decode.number(checks.get(outcome.encode())) for outcome in CROSSCHECK_OUTCOMES},
            deliveries=await _read_deliveries(redis),
            outcomes={code: decode.number(counts.get(code.encode())) for code in OUTCOMES},
            prefix_tokens={each: decode.number(prefixes.get(each.encode())) for each in PREFIX_SOURCES},
            result_cache=await ResultCacheState.read(redis),
            prefix_events={
                (tier, event): decode.number(events.get(f"{tier}:{event}".encode()))
                for tier in PREFIX_TIERS
                for event in PREFIX_EVENTS
            },
            checkpoint_rows={each: decode.number(checkpoints.get(each.encode())) for each in CHECKPOINT_ROWS},
            latency_ms=decode.number(counts.get(store.LATENCY_MS.encode())),
        )


class QueueSnapshots:
    """Give all who ask the same snapshot, which is read at most once in FRESH_S."""

    def __init__(self, redis: Redis, models: Models) -> None:
        self._redis = redis
        self._models = models
        self._shared = SharedRead(self._read)

    async def latest(self) -> QueueSnapshot:
        """Return a snapshot that is at most FRESH_S old. Raises RedisError."""
        return await self._shared.since(clock_s() - FRESH_S)

    async def close(self) -> None:
        """End a read that is under way."""
        await self._shared.close()

    async def _read(self) -> QueueSnapshot:
        return await QueueSnapshot.read(self._redis, await self._models.live())


async def _read_unserved(
    redis: Redis, served: Sequence[str], now: float
) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Add up the jobs of the queues that are not served, and the age of the oldest, both under UNSERVED.

    Empty if there is no such queue. At most about MAX_UNSERVED queues are counted, whatever Redis holds.
    """
    count = redis.register_script(load("count_unserved.lua"))
    cursor, num_queues, sums, oldest = b"0", 0, [0] * (1 + len(REGISTRIES)), b""
    while True:
        cursor, num_found, sizes, first = await count(args=[cursor, COUNT_AT_ONCE, *served])
        num_queues += num_found
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        oldest = min(filter(None, (oldest, first)), default=b"")
        if cursor == b"0" or num_queues >= MAX_UNSERVED:
            break
    if num_queues == 0:
        return {}, {}
    return {UNSERVED: dict(zip(("queued", *REGISTRIES), sums, strict=True))}, {UNSERVED: _age_s(oldest, now)}


async def _read_jobs(redis: Redis, queues: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the jobs of every queue and registry."""
    async with redis.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.llen(store.RqKeys.queue(queue))
            pipeline.zcard(store.RqKeys.registry("deferred", queue))
            for registry in REGISTRIES.values():
                pipeline.zcard(store.RqKeys.registry(registry, queue))
        sizes = (size or 0 for size in await decode.execute(pipeline))
    return {
        queue: {"queued": next(sizes) + next(sizes), **{status: next(sizes) for status in REGISTRIES}}
        for queue in queues
    }


async def _read_oldest(redis: Redis, queues: Sequence[str], now: float) -> dict[str, float]:
    async with redis.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.lindex(store.RqKeys.queue(queue), 0)
        heads = await decode.execute(pipeline)
        for head in heads:
            pipeline.hget(store.RqKeys.job("").encode() + (head or b""), store.JobField.ENQUEUED_AT)
        times = await decode.execute(pipeline)
    return {queue: _age_s(enqueued_at, now) for queue, enqueued_at in zip(queues, times, strict=True)}


async def _read_workers(redis: Redis, names: Sequence[str], now: float) -> tuple[dict[str, int], dict[str, float]]:
    """Count the live workers of each model, and return the age of their oldest heartbeat."""
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.smembers(store.RqKeys.workers_of(name))
        members = [keys or () for keys in await decode.execute(pipeline)]
        for keys in members:
            for key in keys:
                pipeline.hget(key, "last_heartbeat")
        heartbeats = iter(await decode.execute(pipeline))
    workers: dict[str, int] = {}
    heartbeat_age_s: dict[str, float] = {}
    for name, keys in zip(names, members, strict=True):
        ages_s = [_age_s(beat, now) for beat in (next(heartbeats) for _ in keys) if beat]  # a dead worker has none
        workers[name] = len(ages_s)
        if ages_s:
            heartbeat_age_s[name] = max(ages_s)
    return workers, heartbeat_age_s


async def _read_live(redis: Redis, live: Sequence[wire.ServedModel], now: float) -> list[LiveWorker]:
    async with redis.pipeline(transaction=False) as pipeline:
        for one in live:
            pipeline.hmget(store.RqKeys.worker(one.worker), "hostname", "last_heartbeat")
        known = [fields or (None, None) for fields in await decode.execute(pipeline)]
    workers = [
        LiveWorker(one, decode.text(host), _age_s(heartbeat, now) if heartbeat else None)
        for one, (host, heartbeat) in zip(live, known, strict=True)
    ]
    return sorted(workers, key=lambda worker: (worker.host, worker.served.id, worker.served.worker))


async def _read_deliveries(redis: Redis) -> dict[str, int]:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.llen(store.RqKeys.queue(store.WEBHOOKS))
        for registry in ("deferred", *DELIVERY_STATES.values()):
            pipeline.zcard(store.RqKeys.registry(registry, store.WEBHOOKS))
        num_listed, num_in_backlogs, *sizes = [size or 0 for size in await decode.execute(pipeline)]
    return {"queued": num_listed + num_in_backlogs, **dict(zip(DELIVERY_STATES, sizes, strict=True))}


def _age_s(iso_time: bytes | None, now: float) -> float:
    """Return the seconds from a time that RQ wrote to `now`, unix, s, both by Redis's clock.

    Returns 0.0 if the time cannot be parsed, so that no record fails a scrape.
    """
    since = decode.parse_iso(iso_time)
    return 0.0 if since is None else max(0.0, now - since)


assert {"queued", *REGISTRIES} == set(get_args(wire.Status))
