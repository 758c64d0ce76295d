"""Create, read, list and cancel the batches of an owner."""

import re
from collections.abc import Sequence
from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, NotFound, QueueFull
from scorepool.api.repositories import decode, files
from scorepool.api.repositories.owned import Row, read_owned
from scorepool.api.repositories.pages import page_after
from scorepool.api.repositories.queue import idempotency_key_reused
from scorepool.api.repositories.quota import Quota, refusal
from scorepool.store.scripts import load
from scorepool.wire.batch import Batch, BatchStatus, CreateBatch, LineEndpoint, RequestCounts
from scorepool.wire.file import FILE_KEPT_S, FileObject

LIVE_RETRY_S = 60  # Retry-After of a name that has too many batches
FIELDS = ("state", "cancel")  # of a batch's hash
ALIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing")
_ID = re.compile(r"batch_[0-9a-f]{32}")
STALLED_S = 120.0  # without the end of a line, after which nothing is said about the others,
STALLED_PACES = 2.0  # if this is as many times as long as they have taken so far
INPUT_FILE_MARGIN_S = 3600  # how long an input file outlives the window of a batch that reads it


# Names in Redis, which the previous release reads too.
_STORED_NAMES = {
    "chunk": "part",
    "line_number": "number",
    "num_started": "num_taken",
    "output_chunks": "output_parts",
    "error_chunks": "error_parts",
    "mark_at": "first_group_ended_at",
    "num_at_mark": "num_first_ended",
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
    first_ended_at: float | None = None  # when the first line ended, unix, s
    # From which the pace is measured: the end of the first group of lines, later a time at which a quarter to half of
    # the lines that have ended now had ended.
    mark_at: float | None = None
    num_at_mark: int = 0
    next_mark_at: float | None = None  # takes its place when as many again have ended
    num_at_next_mark: int = 0
    last_ended_at: float | None = None


class Batches:
    """Create, read, list and cancel batches; api/batches runs them."""

    def __init__(self, redis: Redis, quota: Quota, max_live: int) -> None:
        self._redis = redis
        self._quota = quota
        self._max_live = max_live  # batches of one owner that have not ended
        self._create_batch = redis.register_script(load("create_batch.lua"))
        self._delete_batch = redis.register_script(load("delete_batch.lua"))

    async def create(self, owner: str, body: CreateBatch, unique_id: str, num_lines: int = 0) -> Batch:
        """Create a batch that is due at once, or return the one that the same body made under this id.

        `unique_id` is 32 hex characters, `num_lines` how many lines the file has if that is known. Raise NotFound,
        BadRequest, QueueFull; Conflict if another body made it.
        """
        files.check_file_id(body.input_file_id, "input_file_id")
        now = await decode.now_s(self._redis)
        batch = Batch(
            id=f"batch_{unique_id}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=int(now),
            expires_at=int(now) + body.window_s,
            request_counts=RequestCounts(total=num_lines),
            metadata=body.metadata,
        )
        ttl_s = FILE_KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds
        progress = BatchProgress(batch=batch, output_ttl_s=ttl_s)
        keys = [store.Keys.batch(batch.id), store.Keys.file(body.input_file_id)]
        earlier, source = await read_owned(self._redis, owner, keys, ["state", "file"])
        if earlier is None:
            _check_input_file(source and source[1], body.input_file_id)
            if await self._write(owner, progress, body.window_s):
                return batch
            [earlier] = await read_owned(self._redis, owner, keys[:1], ["state"])  # another request was faster
        if (found := _progress(earlier)) is None:
            raise _batch_not_found(batch.id)
        if not _is_made_by(found, body, ttl_s):
            raise idempotency_key_reused()
        return await self.read(owner, batch.id)

    async def _write(self, owner: str, progress: BatchProgress, window_s: int) -> bool:
        """Write a new batch; return False if it is there already. Raise NotFound, QueueFull, TooLarge."""
        batch = progress.batch
        listed_s, file_kept_s = window_s + FILE_KEPT_S, window_s + INPUT_FILE_MARGIN_S
        args: list[str | bytes | int] = [owner, batch.id, batch.input_file_id, wire.encode(progress)]
        args += [listed_s, file_kept_s, self._max_live, store.BATCH_BYTES, self._quota.max_bytes]
        answer = await self._create_batch(keys=[store.Keys.batches], args=args)
        if answer == [b"no_file"]:
            raise files.file_not_found(batch.input_file_id, "input_file_id")
        if answer == [b"too_many"]:
            raise QueueFull(
                f"{self._max_live} of your batches have not ended (SCOREPOOL_MAX_BATCHES_PER_KEY); wait for one, "
                "or cancel one",
                LIVE_RETRY_S,
            )
        if answer not in ([b"created"], [b"known"]):
            raise refusal(answer)
        return bool(answer == [b"created"])

    async def owner(self, batch_id: str) -> str | None:
        """Return whose batch this is, for those who may see every owner's; None if there is none."""
        _check_id(batch_id)
        found: Any = await self._redis.hget(store.Keys.batch(batch_id), "owner")
        return None if found is None else decode.text(found)

    async def read(self, owner: str, batch_id: str) -> Batch:
        """Return a batch; raise NotFound."""
        _check_id(batch_id)
        [batch] = await self._read(owner, [batch_id])
        if batch is None:
            raise _batch_not_found(batch_id)
        return batch

    async def page(
        self,
        owner: str,
        after: str | None,
        limit: int,
        *,
        endpoint: LineEndpoint | None = None,
        newest_first: bool = True,
    ) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, of one endpoint or all, and True if more follow. Raise BadRequest."""

        async def read(ids: Sequence[str]) -> list[Batch | None]:
            found = await self._read(owner, ids)
            return [batch if batch and endpoint in (None, batch.endpoint) else None for batch in found]

        return await page_after(self._redis, store.Keys.batches_of(owner), after, limit, read, newest_first)

    async def delete(self, owner: str, batch_id: str) -> None:
        """Delete the record of a batch that has ended."""
        await self._delete_batch(args=[batch_id, owner])

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch: no more lines are started, and its jobs are canceled. Raise NotFound, Conflict."""
        _check_id(batch_id)
        key, now = store.Keys.batch(batch_id), await decode.now_s(self._redis)

        async def write(pipeline: Pipeline) -> None:
            [row] = await read_owned(pipeline, owner, [key], FIELDS)
            batch = _to_batch(row, now)
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
        keys = [store.Keys.batch(batch_id) for batch_id in batch_ids]
        now = await decode.now_s(self._redis)
        return [_to_batch(row, now) for row in await read_owned(self._redis, owner, keys, FIELDS)]


def _check_input_file(packed: object, file_id: str) -> None:
    """Check the record of a file from which a batch is made; raise NotFound, BadRequest."""
    file = decode.message(packed, FileObject, "msgpack")
    if file is None:
        raise files.file_not_found(file_id, "input_file_id")
    if file.purpose != "batch":
        raise BadRequest("input_file_id: expected a file whose purpose is 'batch'", "input_file_id")


def _progress(row: Row | None) -> BatchProgress | None:
    return decode.message(row[0], BatchProgress, "msgpack") if row else None


def _is_made_by(progress: BatchProgress, body: CreateBatch, output_ttl_s: int) -> bool:
    batch = progress.batch
    return (batch.input_file_id, batch.endpoint, batch.completion_window, batch.metadata, progress.output_ttl_s) == (
        body.input_file_id,
        body.endpoint,
        body.completion_window,
        body.metadata,
        output_ttl_s,
    )


def _to_batch(row: Row | None, now: float) -> Batch | None:
    """Build a batch from the values of FIELDS; return None for a batch that is missing or another owner's.

    `now` is a unix time, s.
    """
    progress = _progress(row)
    if row is None or progress is None:
        return None
    batch = progress.batch
    if row[1] is not None and batch.status in ALIVE:
        return replace(batch, status="cancelling", cancelling_at=int(decode.unix_s(row[1]) or 0))
    return replace(batch, estimated_end_at=estimate_end(progress, now))


def estimate_end(progress: BatchProgress, now: float) -> int | None:
    """Estimate when the last line ends, unix, s, rounded up, from the pace of late; None without a pace.

    The time until the first lines ended tells little about the others, and a worker that has just started is slower for
    some seconds: both are left out as the batch goes on. So is the time since the last ones ended: answers come in
    groups, and workers that stop do not make the lines slower. But after STALLED_S without an end, there is no pace.
    """
    batch, counts = progress.batch, progress.batch.request_counts
    num_ended = counts.completed + counts.failed
    if batch.status != "in_progress" or batch.in_progress_at is None or num_ended == 0:
        return None
    pace_s = (now - batch.in_progress_at) / num_ended  # per line
    began_at = progress.mark_at or progress.first_ended_at
    if began_at is not None and num_ended > progress.num_at_mark:
        last_ended_at = progress.last_ended_at or now  # an earlier release wrote no such times
        lasted_s = last_ended_at - (progress.first_ended_at or began_at)
        if now - last_ended_at > max(STALLED_S, STALLED_PACES * lasted_s):
            return None
        pace_s = (last_ended_at - began_at) / (num_ended - progress.num_at_mark)
    return min(batch.expires_at, ceil(now + max(0.0, pace_s * (counts.total - num_ended))))


def _check_id(batch_id: str) -> None:
    """Check the form of an id before it becomes a key in Redis. Raise NotFound."""
    if not _ID.fullmatch(batch_id):
        raise _batch_not_found(batch_id)


def _batch_not_found(batch_id: str) -> NotFound:
    return NotFound(f"no batch {wire.quote(batch_id)}; batches are kept for 30 days after their end", "id")
