"""Submit, cancel and delete jobs. One script for each act, so it happens wholly or not at all."""

import hashlib
import hmac
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import Conflict, NotReplicated, QueueFull, TooLarge, Unavailable
from scorepool.api.repositories import decode, quota
from scorepool.api.repositories.jobs import ENDED, EXPIRED, check_id, job_not_found, status_of
from scorepool.api.repositories.quota import MAX_CONTEXT, Quota, job_bytes
from scorepool.store.job_hash import new_job
from scorepool.store.keys import DEFAULT_PREFIX, PREFIX
from scorepool.store.scripts import load

CANCELED = wire.encode(wire.Failure(code="canceled", message="canceled by its owner before it was started"))
DRAIN_WINDOW_S = 60  # over which the speed of a queue is measured
UNKNOWN_DRAIN_RETRY_S = 5  # Retry-After of a full queue that finished nothing in that time
MAX_RETRY_AFTER_S = 3600
UNSERVED_RETRY_S = 60  # Retry-After: queues without jobs are forgotten once a minute (lua/unserved.lua)
PROBE_TTL_S = 60
REPLICAS_TIMEOUT_S = 2.0  # less than that of a command


class Submitted(msgspec.Struct, frozen=True):
    """Report a job that was accepted."""

    id: str
    status: wire.Status
    is_replay: bool  # the job was there before, under the same Idempotency-Key


class Queue:
    """Submit, cancel and delete jobs."""

    def __init__(
        self, redis: Redis, settings: store.Settings, weight: Callable[[str], int], has_several_owners: bool
    ) -> None:
        """Load the scripts. `weight` returns an owner's share of a queue that several owners use."""
        self._redis = redis
        self._settings = settings
        self._weight = weight
        self._has_several_owners = has_several_owners
        self._quota = Quota.load(settings, has_several_owners)
        self._submit = redis.register_script(load("submit.lua"))
        self._cancel = redis.register_script(load("cancel.lua"))
        self._delete = redis.register_script(load("delete.lua"))

    async def submit(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        job_ids: Sequence[str],
        submission_fingerprint: str | None = None,
        result_ttl_s: int | None = None,
        batch: str | None = None,
        *,
        context_lengths: Mapping[str, int] | None = None,
        is_synchronous: bool = False,
        traceparent: str = "",
        kept_body: bytes = b"",
    ) -> list[Submitted]:
        """Put all jobs on their queues or none, in one round trip.

        `submission_fingerprint` is the fingerprint of the submission as it came, with aliases, if they were replaced
        since. `batch` is the id of the batch whose lines the requests are. `kept_body` is kept with each job.
        `context_lengths` are those of the models that are served; without it, all are. Raises Conflict, QueueFull,
        TooLarge, NotReplicated, Unavailable.
        """
        submission_fingerprint = submission_fingerprint or fingerprint(requests)
        ttl_s = result_ttl_s or self._settings.result_ttl_s
        list_length = min(store.LIST_LENGTH, self._settings.max_jobs_in_flight) if self._has_several_owners else 0
        settings = self._settings
        args: list[str | bytes | int | float] = [owner, settings.max_queue_depth, list_length]
        args += [settings.max_unserved_queues_per_key, settings.max_unserved_queues]
        args += [self._quota.max_jobs, self._quota.max_bytes]
        weight = self._weight(owner) if self._has_several_owners else None
        async for job_id, request in tasks.in_turns(zip(job_ids, requests, strict=True)):
            fields = new_job(
                owner, weight, request, ttl_s, batch, is_synchronous=is_synchronous, traceparent=traceparent
            )
            queue = store.queue_name(request.model, request.priority)
            body = wire.encode(request)
            is_unserved = context_lengths is not None and request.model not in context_lengths
            context_length = (context_lengths or {}).get(request.model, MAX_CONTEXT)
            num_bytes = job_bytes(request, body, context_length, batch is not None) + len(kept_body)
            args += (job_id, queue, int(is_unserved), submission_fingerprint, body, kept_body, num_bytes)
            args += (len(fields), *fields)
        answer, num_replicas = await self._run_submit(args)
        match answer:
            case [b"accepted", _] if num_replicas < self._settings.redis_min_replicas:
                raise NotReplicated(
                    f"the queue has this request, but only {num_replicas} of its replicas, expected "
                    f"{self._settings.redis_min_replicas} (SCOREPOOL_REDIS_MIN_REPLICAS)",
                    job_ids,
                )
            case [b"accepted", statuses]:
                return [
                    Submitted(job_id, status_of(status) if status else "queued", bool(status))
                    for job_id, status in zip(job_ids, statuses, strict=True)
                ]
            case [b"full", queue_key, depth, num_new]:
                raise await self._full(queue_key.decode(), depth, num_new)
            case [b"no_memory" | b"over_quota", *_]:
                raise quota.refusal(answer)
            case [b"unserved", whose, num_queues]:
                raise self._too_many_unserved(whose == b"own", num_queues)
            case [b"wrong_type", key, expected]:
                raise Unavailable(f"the queue cannot take jobs: the Redis key {key.decode()} is no {expected.decode()}")
            case _:
                raise idempotency_key_reused()

    async def _run_submit(self, args: list[str | bytes | int | float]) -> tuple[Any, int]:
        """Return the script's answer, and how many replicas have what it wrote, if the settings ask for any."""
        if not self._settings.redis_min_replicas:
            return await self._submit(args=args), 0
        async with self._redis.pipeline(transaction=False) as pipeline:  # WAIT counts the writes of one connection
            await self._submit(args=args, client=pipeline)
            pipeline.execute_command("WAIT", self._settings.redis_min_replicas, int(REPLICAS_TIMEOUT_S * 1000))
            answer, num_replicas = await pipeline.execute()
        return answer, num_replicas

    async def job_ids(self, owner: str, key: str | None, count: int | None, model: str | None = None) -> list[str]:
        """Return an id of 32 hex characters for each job of a submission; `count` is None unless it is a bulk.

        `model` is the one that the first job names, which only a deployment of several servers looks at.

        Ids under an Idempotency-Key follow from owner, key and index, and from a secret of this deployment: nobody else
        can compute them. It is read each time, because another process makes another one after Redis was emptied.

        Jobs that release 0.1.0 accepted under the key have the ids of that release, and keep them until they are gone.
        """
        if key is None:
            return new_job_ids(count or 1)
        texts = _id_texts(owner, key, count)
        ids_of_0_1_0 = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts]
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.exists(*map(store.RqKeys.job, ids_of_0_1_0))
            pipeline.get(store.Keys.id_secret)
            num_of_0_1_0, secret = await pipeline.execute()
        if num_of_0_1_0:
            return ids_of_0_1_0
        if secret is None:
            new = secrets.token_bytes(32)
            secret = await self._redis.set(store.Keys.id_secret, new, nx=True, get=True) or new
        return [hmac.digest(secret, text, "sha256").hex()[:32] for text in texts]

    async def count_known(self, job_ids: Sequence[str]) -> int:
        """Return how many of these jobs exist."""
        found: int = await self._redis.exists(*map(store.RqKeys.job, job_ids))
        return found

    async def was_submitted(self, requests: Sequence[wire.Request], job_ids: Sequence[str]) -> bool:
        """True if an earlier call with the same Idempotency-Key left all of these jobs. Raises Conflict."""
        submission_fingerprint = fingerprint(requests).encode()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hget(store.RqKeys.job(job_id), store.JobField.FINGERPRINT)
            found = await pipeline.execute()
        if any(other is not None and other != submission_fingerprint for other in found):
            raise idempotency_key_reused()
        return all(found)

    async def _full(self, queue: str, depth: int, num_new: int) -> QueueFull | TooLarge:
        """Build the error for a full queue, with a Retry-After taken from how fast the queue moves."""
        max_depth = self._settings.max_queue_depth
        if num_new > max_depth:
            return TooLarge(
                f"{num_new} jobs at once never fit: a queue holds at most {max_depth} (SCOREPOOL_MAX_QUEUE_DEPTH)"
            )
        drained_per_s = await self._drained_per_s(queue)
        retry_after_s = UNKNOWN_DRAIN_RETRY_S
        if drained_per_s:
            retry_after_s = math.ceil((depth + num_new - max_depth) / drained_per_s)
        return QueueFull(
            f"{depth} jobs wait in the queue {queue}; with the {num_new} of this request there would be more than "
            f"{max_depth} (SCOREPOOL_MAX_QUEUE_DEPTH), so nothing of it was accepted",
            min(max(retry_after_s, 1), MAX_RETRY_AFTER_S),
        )

    def _too_many_unserved(self, is_own: bool, num_queues: int) -> QueueFull:
        """Build the error for a queue of a model that nobody serves, if there are too many such queues."""
        name = "SCOREPOOL_MAX_UNSERVED_QUEUES" + ("_PER_KEY" if is_own else "")
        most = self._settings.max_unserved_queues_per_key if is_own else self._settings.max_unserved_queues
        whose = "your jobs are" if is_own else "the jobs of all keys are"
        return QueueFull(
            f"wait_for_model: {whose} in {num_queues} queues of models that no worker serves, expected at most {most} "
            f"({name}); delete the jobs of a model that you no longer wait for, or ask for a model that is served",
            UNSERVED_RETRY_S,
        )

    async def _drained_per_s(self, queue: str) -> float:
        """Return how many jobs a second have ended since the first that ended in the last minute; 0.0 if none did."""
        end_to_expiry_s = self._settings.result_ttl_s  # registries hold the time of expiry
        now = await decode.now_s(self._redis)
        until = now + end_to_expiry_s + 1.0  # RQ writes whole seconds; a job kept for longer is not counted
        since = until - 1.0 - DRAIN_WINDOW_S
        async with self._redis.pipeline(transaction=False) as pipeline:
            for registry in (store.RqKeys.registry("finished", queue), store.RqKeys.registry("failed", queue)):
                pipeline.zcount(registry, since, until)
                pipeline.zrangebyscore(registry, since, until, start=0, num=1, withscores=True)
            counts_and_firsts: list[Any] = await decode.execute(pipeline)
        num_drained: int = sum(count or 0 for count in counts_and_firsts[::2])
        firsts: list[float] = [expiry for rows in counts_and_firsts[1::2] for _, expiry in rows or ()]
        if not firsts:
            return 0.0
        return num_drained / max(1.0, now + end_to_expiry_s - min(firsts))

    async def cancel(self, owner: str, job_id: str) -> None:
        """Cancel a job: at once while it waits; a running job is marked, and its worker is notified.

        Raises NotFound, Conflict.
        """
        check_id(job_id)
        args = (job_id, owner, CANCELED, self._settings.result_ttl_s, wire.encode(EXPIRED))
        match await self._cancel(args=args):
            case [b"absent"]:
                raise job_not_found(job_id)
            case [b"ended", status] if (ended := status_of(status)) != "canceled":
                raise Conflict(f"the job has already {ended}; read it with GET /v1/jobs/{job_id}", "id")

    async def delete(self, owner: str, job_id: str) -> None:
        """Delete a job that has ended, with its deliveries. Raises NotFound, Conflict."""
        check_id(job_id)
        match await self._delete(args=[job_id, owner]):
            case [b"absent"]:
                raise job_not_found(job_id)
            case [b"alive", status]:
                raise Conflict(
                    f"the job is {status_of(status)}, only a job that {_either(ENDED)} can be deleted; "
                    f"end it with POST /v1/jobs/{job_id}/cancel first",
                    "id",
                )


async def check_writable(redis: Redis) -> None:
    """Write a key that expires. Raises RedisError if Redis takes no writes."""
    await redis.set(store.Keys.probe, "1", ex=PROBE_TTL_S)


def _either(words: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return ", ".join(words[:-1]) + f" or {words[-1]}"


# With their defaults.
_LATER_FIELDS: dict[str, object] = {
    "targets": None,
    "logprobs_mode": None,
    "target_bytes": False,
    "packed": False,
    "on_item_error": "fail",
    "truncate": None,
    "adapter": None,
    "cache": True,
    "cache_salt": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "regex": None,
    "choice": None,
    "grammar": None,
    "images": [],
    "speculation": None,
    "speculation_tokens": None,
    "include_draft_logprobs": False,
    "specprefill": False,
    "specprefill_keep_pct": None,
    "if_weights": None,
    "truncate_to": None,
}


def fingerprint(requests: Sequence[wire.Request]) -> str:
    """Hash a whole submission in its canonical form: JSON and msgpack of one request have the same fingerprint.

    Fields that have their default are hashed too, as in release 0.1.0, so that a submission that is repeated during or
    after an upgrade has the fingerprint that Redis holds. A field that was added later is hashed only if it is set.
    """
    digest = hashlib.blake2b(digest_size=16)
    for request in requests:
        fields = msgspec.structs.asdict(request)
        if isinstance(request, wire.Score) and request.prompt is None:
            del fields["prompt"]
        for name, default in _LATER_FIELDS.items():
            if name in fields and fields[name] == default:
                del fields[name]
        body = wire.encode({"type": wire.kind_of(request), **fields})
        digest.update(len(body).to_bytes(8, "big") + body)
    return digest.hexdigest()


def new_job_ids(count: int) -> list[str]:
    """Return random ids of 32 hex characters each."""
    return [uuid4().hex for _ in range(count)]


def _id_texts(owner: str, key: str, count: int | None) -> list[bytes]:
    """Return the texts from which the ids of jobs under an Idempotency-Key follow, one a job.

    They hold the Redis prefix, too. In release 0.1.0 the ids were hashes of these texts.
    """
    indices = [""] if count is None else [str(index) for index in range(count)]
    deployment = () if PREFIX == DEFAULT_PREFIX else (PREFIX,)
    return ["\0".join((*deployment, owner, key, index)).encode() for index in indices]


def idempotency_key_reused() -> Conflict:
    """Build the error for a key that came with another submission."""
    return Conflict(
        "Idempotency-Key: it came before with another body; use a new one for a new submission", "Idempotency-Key"
    )
