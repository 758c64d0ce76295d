"""Create, read, list and cancel the batches of an owner."""

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
from scorepool.api.repositories.pages import add_to_list, page_after

ALIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing")
INPUT_FILE_MARGIN_S = 3600  # how long an input file outlives the window of a batch that reads it


# Names in Redis, which the previous release reads too.
_STORED_NAMES = {
    "chunk": "part",
    "line_number": "number",
    "num_started": "num_taken",
    "output_chunks": "output_parts",
    "error_chunks": "error_parts",
}


class BatchProgress(Struct, frozen=True, kw_only=True, rename=_STORED_NAMES):
    """Hold the state of a batch between two leases."""

    batch: Batch
    output_ttl_s: int
    chunk: int = 0  # number of the input file's chunk that is read next
    line: int = 0  # lines of that chunk that were read
    line_number: int = 0  # lines of the file that were read, blank ones too
    num_started: int = 0  # lines that have or had jobs, or ended without one
    is_read: bool = False
    output_chunks: int = 0
    output_bytes: int = 0
    error_chunks: int = 0
    error_bytes: int = 0


class Batches:
    """Create, read, list and cancel batches; api/batches runs them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, owner: str, body: CreateBatch) -> Batch:
        """Create a batch that is due at once; raise NotFound, BadRequest."""
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
                raise files.file_not_found(body.input_file_id, "input_file_id")
            if file.purpose != "batch":
                raise BadRequest("input_file_id: expected a file whose purpose is 'batch'", "input_file_id")
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(source, f"batch:{batch.id}", "1")
            for key in (source, store.Keys.file_parts(body.input_file_id), store.Keys.files_of(owner)):
                pipeline.expire(key, body.window_s + INPUT_FILE_MARGIN_S, gt=True)
            pipeline.hset(store.Keys.batch(batch.id), mapping={"owner": owner, "state": wire.encode(progress)})
            add_to_list(pipeline, store.Keys.batches_of(owner), batch.id, now, body.window_s + FILE_KEPT_S)
            pipeline.zadd(store.Keys.batches, {batch.id: 0})

        await self._redis.transaction(write, source)
        return batch

    async def read(self, owner: str, batch_id: str) -> Batch:
        """Return a batch; raise NotFound."""
        [batch] = await self._read(owner, [batch_id])
        if batch is None:
            raise _batch_not_found(batch_id)
        return batch

    async def page(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, and True if more follow. Raise BadRequest."""

        async def read(ids: Sequence[str]) -> list[Batch | None]:
            return await self._read(owner, ids)

        return await page_after(self._redis, store.Keys.batches_of(owner), after, limit, read)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch: no more lines are started, and its jobs are canceled. Raise NotFound, Conflict."""
        key, now = store.Keys.batch(batch_id), await decode.now_s(self._redis)

        async def write(pipeline: Pipeline) -> None:
            known: Any = await pipeline.hmget(key, "owner", "state", "cancel")
            batch = _to_batch(owner, known)
            if batch is None:
                raise _batch_not_found(batch_id)
            if batch.status not in (*ALIVE, "cancelling"):
                raise Conflict(f"the batch is {batch.status}, only one that has not ended can be cancelled", "id")
            pipeline.multi()  # type: ignore[no-untyped-call]
            if batch.status != "cancelling":
                pipeline.hset(key, "cancel", f"{now:.6f}")
                pipeline.zadd(store.Keys.batches, {batch_id: 0}, xx=True)

        await self._redis.transaction(write, key)
        return await self.read(owner, batch_id)

    async def _read(self, owner: str, batch_ids: Sequence[str]) -> list[Batch | None]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for batch_id in batch_ids:
                pipeline.hmget(store.Keys.batch(batch_id), "owner", "state", "cancel")
            replies = await decode.execute(pipeline)
        return [_to_batch(owner, reply) if reply else None for reply in replies]


def _to_batch(owner: str, reply: Sequence[bytes | None]) -> Batch | None:
    """Build a batch from its owner, state and cancel fields; return None for another owner and for a missing batch."""
    progress = decode.message(reply[1], BatchProgress, "msgpack") if reply[0] == owner.encode() else None
    if progress is None:
        return None
    batch = progress.batch
    if reply[2] is not None and batch.status in ALIVE:
        return replace(batch, status="cancelling", cancelling_at=int(decode.unix_s(reply[2]) or 0))
    return batch


def _batch_not_found(batch_id: str) -> NotFound:
    return NotFound(f"no batch {batch_id[:64]!r}; batches are kept for 30 days after their end", "id")
