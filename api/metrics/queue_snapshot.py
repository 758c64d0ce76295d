"""Read what an operator watches of the queue, once, as plain data. Knows no Prometheus."""

from collections.abc import Sequence
from typing import Any, Self, get_args

from msgspec import Struct
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.repositories import decode

UNSERVED = "(unserved)"  # stands for all queues whose model no live worker serves
REGISTRIES = {"started": "wip", "finished": "finished", "failed": "failed", "canceled": "canceled"}
DELIVERY_STATES = {"started": "wip", "waiting": "scheduled", "delivered": "finished", "failed": "failed"}
CROSSCHECK_OUTCOMES = ("agreed", "differed", "stopped")
OUTCOMES = ("result", *get_args(wire.FailureCode))


class QueueSnapshot(Struct, frozen=True, kw_only=True):
    """Hold the state of queues, workers and deliveries at one moment. Only queues with a live worker are named."""

    jobs: dict[str, dict[str, int]]  # by queue and status
    oldest_s: dict[str, float]  # by queue: how long its first job has waited
    workers: dict[str, int]  # live ones, by model
    heartbeat_age_s: dict[str, float]  # of the worker with the oldest heartbeat, by model
    stopped: dict[str, int]  # live workers that a crosscheck has stopped, by model
    links: dict[str, list[wire.WorkerLink]]  # what live workers measure, by model
    crosschecks: dict[str, int]  # by outcome
    deliveries: dict[str, int]  # by state
    outcomes: dict[str, int]  # jobs that ended, by `result` or the failure's code

    @classmethod
    async def read(cls, redis: Redis, live: Sequence[wire.ServedModel]) -> Self:
        """Read the snapshot. `live` is what live workers serve. Raises RedisError."""
        models = sorted({model.id for model in live})
        served = {queue for model in models for queue in store.queue_names(model)} | {store.WEBHOOKS}
        keys: Any = await redis.smembers(store.RqKeys.queues)
        queues = sorted({queue for queue in map(_queue_of, keys) if store.is_own_queue(queue)} | served)
        labels = [queue if queue in served else UNSERVED for queue in queues]
        now = await decode.now_s(redis)
        workers, heartbeat_age_s = await _read_workers(redis, [*models, store.WEBHOOKS], now)
        counts: Any = await redis.hgetall(store.Keys.outcome_counts)
        checks: Any = await redis.hgetall(store.Keys.crosscheck_counts)
        return cls(
            jobs=await _read_jobs(redis, queues, labels),
            oldest_s=await _read_oldest(redis, queues, labels, now),
            workers=workers,
            heartbeat_age_s=heartbeat_age_s,
            stopped={model: sum(one.id == model and not one.takes_jobs for one in live) for model in models},
            links={model: [one.link for one in live if one.id == model and one.link] for model in models},
            crosschecks={outcome: decode.number(checks.get(outcome.encode())) for outcome in CROSSCHECK_OUTCOMES},
            deliveries=await _read_deliveries(redis),
            outcomes={code: decode.number(counts.get(code.encode())) for code in OUTCOMES},
        )


async def _read_jobs(redis: Redis, queues: Sequence[str], labels: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count the jobs of every queue and registry; the queues with one label are added up."""
    async with redis.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.llen(store.RqKeys.queue(queue))
            pipeline.zcard(store.RqKeys.registry("deferred", queue))
            for registry in REGISTRIES.values():
                pipeline.zcard(store.RqKeys.registry(registry, queue))
        sizes = (size or 0 for size in await decode.execute(pipeline))
    jobs = {label: dict.fromkeys(("queued", *REGISTRIES), 0) for label in labels}
    for label in labels:
        jobs[label]["queued"] += next(sizes) + next(sizes)
        for status in REGISTRIES:
            jobs[label][status] += next(sizes)
    return jobs


async def _read_oldest(redis: Redis, queues: Sequence[str], labels: Sequence[str], now: float) -> dict[str, float]:
    async with redis.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.lindex(store.RqKeys.queue(queue), 0)
        heads = await decode.execute(pipeline)
        for head in heads:
            pipeline.hget(store.RqKeys.job("").encode() + (head or b""), store.JobField.ENQUEUED_AT)
        times = await decode.execute(pipeline)
    ages_s = dict.fromkeys(labels, 0.0)
    for label, enqueued_at in zip(labels, times, strict=True):
        ages_s[label] = max(ages_s[label], _age_s(enqueued_at, now))
    return ages_s


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


async def _read_deliveries(redis: Redis) -> dict[str, int]:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.llen(store.RqKeys.queue(store.WEBHOOKS))
        for registry in DELIVERY_STATES.values():
            pipeline.zcard(store.RqKeys.registry(registry, store.WEBHOOKS))
        sizes = await decode.execute(pipeline)
    return {state: size or 0 for state, size in zip(("queued", *DELIVERY_STATES), sizes, strict=True)}


def _age_s(iso_time: bytes | None, now: float) -> float:
    """Return the seconds from a time that RQ wrote to `now`, unix, s, both by Redis's clock.

    Returns 0.0 if the time cannot be parsed, so that no record fails a scrape.
    """
    since = decode.parse_iso(iso_time)
    return 0.0 if since is None else max(0.0, now - since)


assert {"queued", *REGISTRIES} == set(get_args(wire.Status))


def _queue_of(key: bytes) -> str:
    return decode.text(key).removeprefix(store.RqKeys.queue(""))
