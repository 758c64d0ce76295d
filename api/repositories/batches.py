"""Batches as their owners see them: created, read, listed, cancelled."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.dialects.openai.batch import Batch, BatchStatus, CreateBatch
from scorepool.api.dialects.openai.files import FILE_KEPT_S, FileObject
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.repositories import decode, files
from scorepool.api.repositories.pages import page_of

ALIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing")
GRACE_S = 3600  # for which an input file outlives the window of a batch that reads it


class BatchProgress(Struct, frozen=True, kw_only=True):
    """What one turn leaves for the next."""

    batch: Batch
    output_ttl_s: int
    part: int = 0  # of the input file, where reading goes on
    line: int = 0  # lines of that part that were read
    number: int = 0  # lines of the file that were read, blank ones too
    num_taken: int = 0  # lines that have or had jobs, or an entry
    is_read: bool = False
    output_parts: int = 0
    output_bytes: int = 0
    error_parts: int = 0
    error_bytes: int = 0


class Batches:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, owner: str, body: CreateBatch) -> Batch:
        """Its turn comes at once. Raises NotFound, BadRequest."""
        now = await decode.now_s(self._redis)
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=int(now),
            expires_at=int(now) + body.window_s,
            metadata=body.metadata,
        )
        ttl_s = FILE_KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds
        progress = BatchProgress(batch=batch, output_ttl_s=ttl_s)
        source = store.Keys.file(body.input_file_id)

        async def write(pipeline: Pipeline) -> None:
            known: Any = await pipeline.hmget(source, "owner", "file")
            file = decode.message(known[1], FileObject, "msgpack") if known[0] == owner.encode() else None
            if file is None:
                raise files.absent(body.input_file_id, "input_file_id")
            if file.purpose != "batch":
                raise BadRequest("input_file_id: expected a file whose purpose is 'batch'", "input_file_id")
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(source, f"batch:{batch.id}", "1")
            for key in (source, store.Keys.file_parts(body.input_file_id)):
                pipeline.expire(key, body.window_s + GRACE_S, gt=True)
            pipeline.hset(store.Keys.batch(batch.id), mapping={"owner": owner, "state": wire.encode(progress)})
            pipeline.zadd(store.Keys.batches_of(owner), {batch.id: now})
            pipeline.zremrangebyscore(store.Keys.batches_of(owner), "-inf", now - 2 * FILE_KEPT_S)
            pipeline.zadd(store.Keys.batches, {batch.id: 0})

        await self._redis.transaction(write, source)
        return batch

    async def read(self, owner: str, id: str) -> Batch:  # noqa: A002
        """Raises NotFound."""
        [batch] = await self._read(owner, [id])
        if batch is None:
            raise _absent(id)
        return batch

    async def page(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Raises BadRequest."""

        async def read(ids: Sequence[str]) -> list[Batch | None]:
            return await self._read(owner, ids)

        return await page_of(self._redis, store.Keys.batches_of(owner), after, limit, read)

    async def cancel(self, owner: str, id: str) -> Batch:  # noqa: A002
        """Nothing more is started; what runs is told to stop. Raises NotFound, Conflict."""
        key, now = store.Keys.batch(id), await decode.now_s(self._redis)

        async def write(pipeline: Pipeline) -> None:
            known: Any = await pipeline.hmget(key, "owner", "state", "cancel")
            batch = _seen(owner, known)
            if batch is None:
                raise _absent(id)
            if batch.status not in (*ALIVE, "cancelling"):
                raise Conflict(f"the batch is {batch.status}, only one that has not ended can be cancelled", "id")
            pipeline.multi()  # type: ignore[no-untyped-call]
            if batch.status != "cancelling":
                pipeline.hset(key, "cancel", f"{now:.6f}")
                pipeline.zadd(store.Keys.batches, {id: 0}, xx=True)

        await self._redis.transaction(write, key)
        return await self.read(owner, id)

    async def _read(self, owner: str, ids: Sequence[str]) -> list[Batch | None]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id_ in ids:
                pipeline.hmget(store.Keys.batch(id_), "owner", "state", "cancel")
            rows = await decode.replies(pipeline)
        return [_seen(owner, row) if row else None for row in rows]


def _seen(owner: str, known: Sequence[bytes | None]) -> Batch | None:
    """None for another owner's, and for one that is gone."""
    progress = decode.message(known[1], BatchProgress, "msgpack") if known[0] == owner.encode() else None
    if progress is None:
        return None
    batch = progress.batch
    if known[2] is not None and batch.status in ALIVE:
        return replace(batch, status="cancelling", cancelling_at=int(decode.unix_s(known[2]) or 0))
    return batch


def _absent(id: str) -> NotFound:  # noqa: A002
    return NotFound(f"no batch {id[:64]!r}; batches are kept for 30 days after their end", "id")
