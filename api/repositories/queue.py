"""Jobs on their way into Redis and out of it. One script an act, so each happens wholly or not at all."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.job import Job as RqJob

from scorepool import store, wire
from scorepool.api.http.errors import Conflict, QueueFull, TooLarge, Unavailable
from scorepool.api.repositories import decode
from scorepool.api.repositories.jobs import ENDED, absent, check_id, status_of
from scorepool.store.job_hash import iso_now, run_hash
from scorepool.store.scripts import load

CANCELED = wire.encode(wire.Failure(code="canceled", message="canceled by its owner before it was started"))
DRAIN_WINDOW_S = 60  # over which the speed of a queue is measured
UNKNOWN_DRAIN_RETRY_S = 5  # Retry-After of a full queue that finished nothing in that time
MAX_RETRY_AFTER_S = 3600
REPLICAS_TIMEOUT_S = 2.0  # less than that of a command


class Submitted(msgspec.Struct, frozen=True):
    id: str
    status: wire.Status
    is_replay: bool  # the job was there before, under the same Idempotency-Key


class Queue:
    def __init__(
        self, redis: Redis, settings: store.Settings, weight: Callable[[str], int], has_several_owners: bool
    ) -> None:
        """`weight` returns an owner's share of a queue that several owners use."""
        self._redis = redis
        self._settings = settings
        self._weight = weight
        self._has_several_owners = has_several_owners
        self._submit = redis.register_script(load("submit.lua"))
        self._cancel = redis.register_script(store.OUTBOX + load("cancel.lua"))
        self._delete = redis.register_script(load("delete.lua"))

    async def submit(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        ids: Sequence[str],
        print_: str | None = None,
        result_ttl_s: int | None = None,
        batch: str | None = None,
        *,
        is_synchronous: bool = False,
    ) -> list[Submitted]:
        """All of them or none, in one round trip. `print_` is the fingerprint of the submission as it came, where
        aliases in it were replaced. `batch`: that of which they are lines. `is_synchronous`: their client waits, so
        registered webhook endpoints get no event. Raises Conflict, QueueFull, TooLarge, Unavailable."""
        print_ = print_ or fingerprint(requests)
        ttl_s = result_ttl_s or self._settings.result_ttl_s
        bodies = [wire.encode(request) for request in requests]
        args: list[str | bytes | int | float] = [
            self._settings.max_queue_depth,
            store.Keys.wakeup(""),
            owner,
            self._settings.max_jobs_in_flight if self._has_several_owners else 0,
        ]
        weight = self._weight(owner)
        for id_, request, body in zip(ids, requests, bodies, strict=True):
            run = run_hash(owner, weight, request, ttl_s, batch, is_synchronous=is_synchronous)
            args += (id_, store.queue_name(request.model, request.priority), print_, store.Keys.request(id_), body)
            args += (len(run), *run)
        answer, num_replicas = await self._run_submit([store.Keys.owned(owner)], args)
        match answer:
            case [b"accepted", _] if num_replicas < self._settings.redis_min_replicas:
                raise Unavailable(
                    f"the queue has this request, but {num_replicas} of {self._settings.redis_min_replicas} replicas; "
                    "send it again with the same Idempotency-Key"
                )
            case [b"accepted", statuses]:
                return [
                    Submitted(id_, status_of(status) if status else "queued", bool(status))
                    for id_, status in zip(ids, statuses, strict=True)
                ]
            case [b"full", queue, depth, num_new]:
                raise await self._full(queue.decode(), depth, num_new)
            case _:
                raise already_used()

    async def _run_submit(self, keys: list[str], args: list[str | bytes | int | float]) -> tuple[Any, int]:
        """The script's answer, and how many replicas have what it wrote, if the settings ask for any."""
        if not self._settings.redis_min_replicas:
            return await self._submit(keys=keys, args=args), 0
        async with self._redis.pipeline(transaction=False) as pipeline:  # WAIT is of one connection
            await self._submit(keys=keys, args=args, client=pipeline)
            pipeline.execute_command("WAIT", self._settings.redis_min_replicas, int(REPLICAS_TIMEOUT_S * 1000))
            answer, num_replicas = await pipeline.execute()
        return answer, num_replicas

    async def known(self, requests: Sequence[wire.Request], ids: Sequence[str]) -> bool:
        """Whether an earlier call with the same Idempotency-Key left all of these jobs. Raises Conflict."""
        print_ = fingerprint(requests)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id_ in ids:
                pipeline.hget(RqJob.key_for(id_), "fingerprint")
            found = await pipeline.execute()
        if any(other is not None and other != print_.encode() for other in found):
            raise already_used()
        return all(found)

    async def _full(self, queue: str, depth: int, num_new: int) -> QueueFull | TooLarge:
        """With a Retry-After taken from how fast the queue moves."""
        max_depth = self._settings.max_queue_depth
        if num_new > max_depth:
            return TooLarge(f"{num_new} jobs at once never fit: a queue of this server holds at most {max_depth}")
        drained_per_s = await self._drained_per_s(queue)
        retry_after_s = UNKNOWN_DRAIN_RETRY_S
        if drained_per_s:
            retry_after_s = math.ceil((depth + num_new - max_depth) / drained_per_s)
        return QueueFull(
            f"{depth} jobs wait in the queue {queue}, whose limit is {max_depth}; nothing of this request was accepted",
            min(max(retry_after_s, 1), MAX_RETRY_AFTER_S),
        )

    async def _drained_per_s(self, queue: str) -> float:
        """Jobs that ended in the last minute, over the time since the first of them; 0.0 if there was none."""
        end_to_expiry_s = self._settings.result_ttl_s  # registries hold the time of expiry
        now = await decode.now_s(self._redis)
        until = now + end_to_expiry_s + 1.0  # RQ writes whole seconds; a job kept for longer is not counted
        since = until - 1.0 - DRAIN_WINDOW_S
        async with self._redis.pipeline(transaction=False) as pipeline:
            for registry in (f"rq:finished:{queue}", f"rq:failed:{queue}"):
                pipeline.zcount(registry, since, until)
                pipeline.zrangebyscore(registry, since, until, start=0, num=1, withscores=True)
            counts_and_firsts: list[Any] = await pipeline.execute()
        num_drained: int = sum(counts_and_firsts[::2])
        firsts: list[float] = [expiry for rows in counts_and_firsts[1::2] for _, expiry in rows]
        if not firsts:
            return 0.0
        return num_drained / max(1.0, now + end_to_expiry_s - min(firsts))

    async def cancel(self, owner: str, id: str) -> None:  # noqa: A002
        """At once while it waits; a running job is marked, and its worker told. Raises NotFound, Conflict."""
        check_id(id)
        answer = await self._cancel(
            keys=[RqJob.key_for(id), store.Keys.request(id), store.Keys.outcome(id), store.DONE, store.Keys.outcomes],
            args=[
                *(id, owner, CANCELED, self._settings.result_ttl_s, iso_now(), f"{time.time():.6f}"),
                PUBSUB_CHANNEL_TEMPLATE % "",
            ],
        )
        match answer:
            case [b"absent"]:
                raise absent(id)
            case [b"ended", status] if (ended := status_of(status)) != "canceled":
                raise Conflict(f"the job has already {ended}; read it with GET /v1/jobs/{id}", "id")

    async def delete(self, owner: str, id: str) -> None:  # noqa: A002
        """Raises NotFound, Conflict."""
        check_id(id)
        answer = await self._delete(
            keys=[
                store.Keys.owned(owner),
                store.Keys.request(id),
                store.Keys.outcome(id),
                store.Keys.deliveries(owner),
            ],
            args=[id, owner],
        )
        match answer:
            case [b"absent"]:
                raise absent(id)
            case [b"alive", status]:
                raise Conflict(
                    f"the job is {status_of(status)}, only a job that {_listed(ENDED)} can be deleted; "
                    f"end it with POST /v1/jobs/{id}/cancel first",
                    "id",
                )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" or {words[-1]}"


def fingerprint(requests: Sequence[wire.Request]) -> str:
    """Of a whole submission, in its canonical form: JSON and msgpack of one request are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for body in map(wire.encode, requests):
        digest.update(len(body).to_bytes(8, "big") + body)
    return digest.hexdigest()


def new_job_ids(owner: str, key: str | None, count: int | None) -> list[str]:
    """32 hex characters each. With an Idempotency-Key they follow from owner, key and, in bulk (`count`), the index."""
    if key is None:
        return [uuid4().hex for _ in range(count or 1)]
    places = [""] if count is None else [str(index) for index in range(count)]
    return [hashlib.blake2b("\0".join((owner, key, place)).encode(), digest_size=16).hexdigest() for place in places]


def already_used() -> Conflict:
    return Conflict(
        "this Idempotency-Key came before with another body; use a new key for a new submission", "Idempotency-Key"
    )
