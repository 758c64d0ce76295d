"""Read and write the lines in progress of a batch and its output files, together and under its lease."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.line_jobs import LineJobs, let_expire
from scorepool.api.batches.lines import EndedLine, LineInProgress
from scorepool.api.repositories.batches import BatchProgress
from scorepool.api.repositories.files import ChunkEnd, compress, write_file
from scorepool.store.scripts import load
from scorepool.wire.batch import Batch, RequestCounts
from scorepool.wire.file import FileObject

OutputKind = Literal["output", "error"]
_COUNT_OUTPUT = load("count_output.lua")
FIRST_S = 2.0  # a worker's first lines end together, and are found in several looks


class BatchStore:
    """Read and write what belongs to a leased batch."""

    def __init__(self, redis: Redis, lease: BatchLease, line_jobs: LineJobs) -> None:
        self._redis = redis
        self._line_jobs = line_jobs
        self.lease = lease
        self._lines_key = store.Keys.batch_lines(lease.batch_id)

    @property
    def batch(self) -> Batch:
        """Return the batch as its owner sees it."""
        return self.lease.progress.batch

    async def in_progress(self) -> list[LineInProgress]:
        """Return the lines that have jobs, in their order."""
        fields: Any = await self._redis.hkeys(self._lines_key)
        return sorted(filter(None, map(LineInProgress.parse, fields)))

    async def texts(self, lines: Sequence[LineInProgress]) -> list[bytes]:
        """Return the input lines themselves."""
        if not lines:
            return []
        texts: Any = await self._redis.hmget(self._lines_key, [str(line) for line in lines])
        return list(texts)

    async def statuses(self, lines: Sequence[LineInProgress]) -> list[list[wire.Status | None]]:
        """Return the statuses of each line's jobs; None for a job that does not exist."""
        job_ids = [line.job_ids(self.lease.batch_id) for line in lines]
        found = iter(await self._line_jobs.statuses([job_id for of_line in job_ids for job_id in of_line]))
        return [[next(found) for _ in of_line] for of_line in job_ids]

    async def outcome_bytes(self, lines: Sequence[LineInProgress]) -> list[int]:
        """Return the bytes of what the jobs of each line ended with."""
        job_ids = [line.job_ids(self.lease.batch_id) for line in lines]
        sizes = iter(await self._line_jobs.outcome_bytes([job_id for of_line in job_ids for job_id in of_line]))
        return [sum(next(sizes) for _ in of_line) for of_line in job_ids]

    async def write(
        self,
        progress: BatchProgress,
        ended: Sequence[EndedLine],
        removed: Sequence[LineInProgress] = (),
        started: Mapping[LineInProgress, bytes] | None = None,
    ) -> None:
        """Append ended lines to their files, change the lines in progress and update the counts, all or nothing.

        Raise LeaseLost.
        """
        output = b"".join(line.text for line in ended if line.usage is not None)
        errors = b"".join(line.text for line in ended if line.usage is None)
        batch_id, now = self.lease.batch_id, self.lease.now
        batch = replace(
            progress.batch,
            output_file_id=file_id_of(batch_id, "output") if output or progress.output_chunks else None,
            error_file_id=file_id_of(batch_id, "error") if errors or progress.error_chunks else None,
            request_counts=_add_counts(progress.batch.request_counts, ended),
            usage=sum((line.usage for line in ended if line.usage is not None), progress.batch.usage),
        )
        after = replace(
            progress,
            batch=batch,
            output_chunks=progress.output_chunks + bool(output),
            output_bytes=progress.output_bytes + len(output),
            error_chunks=progress.error_chunks + bool(errors),
            error_bytes=progress.error_bytes + len(errors),
        )
        if ended:
            after = with_marks(after, now)
        files = output_files(after, now, "uploaded")
        job_ids = [job_id for line in removed for job_id in line.job_ids(batch_id)]

        def write(pipeline: Pipeline) -> None:
            if output:
                self._add_chunk(pipeline, files["output"], progress.output_chunks, compress(output))
            if errors:
                self._add_chunk(pipeline, files["error"], progress.error_chunks, compress(errors))
            if started:
                pipeline.hset(self._lines_key, mapping={str(line): text for line, text in started.items()})
            for line in removed:
                pipeline.hdel(self._lines_key, str(line))
            let_expire(pipeline, self.lease.owner, job_ids, now)

        await self.lease.commit(after, write)
        await self._line_jobs.let_expire(self.lease.owner, job_ids, now)

    def _add_chunk(self, pipeline: Pipeline, file: FileObject, number: int, compressed: bytes) -> None:
        """Add the commands that append a chunk to an output file, which ends with it, and count the chunk.

        It is stored beyond any limit, as results are.
        """
        end = ChunkEnd(file.num_lines or 0, file.bytes)
        key = store.Keys.file_parts(file.id)
        pipeline.hset(key, str(number), compressed)
        pipeline.hset(key, store.Keys.chunk_end(number), str(end))
        write_file(pipeline, self.lease.owner, file)
        pipeline.eval(_COUNT_OUTPUT, 0, self.lease.owner, self.lease.batch_id, file.id, len(compressed))


def output_files(
    progress: BatchProgress, now: float, status: Literal["uploaded", "processed"]
) -> dict[OutputKind, FileObject]:
    """Return the records of the output files that have lines, by kind. `now` is a unix time, s."""
    batch, counts = progress.batch, progress.batch.request_counts
    kinds: tuple[tuple[OutputKind, int, int], ...] = (
        ("output", progress.output_bytes, counts.completed),
        ("error", progress.error_bytes, counts.failed),
    )
    return {
        kind: FileObject(
            id=file_id_of(batch.id, kind),
            bytes=num_bytes,
            created_at=int(now),
            expires_at=int(now) + progress.output_ttl_s,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            status=status,
            num_lines=num_lines,
        )
        for kind, num_bytes, num_lines in kinds
        if num_bytes
    }


def file_id_of(batch_id: str, kind: OutputKind) -> str:
    """Return the id of a batch's output file. It is the same at every call, so every driver writes to one file."""
    return f"file-{hashlib.blake2b(f'{batch_id} {kind}'.encode(), digest_size=16).hexdigest()}"


def _add_counts(counts: RequestCounts, ended: Sequence[EndedLine]) -> RequestCounts:
    num_completed = sum(line.usage is not None for line in ended)
    num_cancelled = (counts.cancelled or 0) + sum(line.ending == "cancelled" for line in ended)
    num_expired = (counts.expired or 0) + sum(line.ending == "expired" for line in ended)
    return RequestCounts(
        total=counts.total,
        completed=counts.completed + num_completed,
        failed=counts.failed + len(ended) - num_completed,
        cancelled=num_cancelled or UNSET,
        expired=num_expired or UNSET,
    )


def with_marks(progress: BatchProgress, now: float) -> BatchProgress:
    """Note that lines have ended, and move the marks between which the pace is measured."""
    counts = progress.batch.request_counts
    num_ended = counts.completed + counts.failed
    after = replace(progress, first_ended_at=progress.first_ended_at or now, last_ended_at=now)
    if now <= (after.first_ended_at or now) + FIRST_S:
        return replace(after, mark_at=now, num_at_mark=num_ended)
    num_at_next_mark = after.num_at_next_mark or after.num_at_mark
    if num_ended < 2 * num_at_next_mark:
        return after
    return replace(
        after,
        mark_at=after.next_mark_at or after.mark_at,
        num_at_mark=num_at_next_mark,
        next_mark_at=now,
        num_at_next_mark=num_ended,
    )
