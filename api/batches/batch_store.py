"""What a batch has going, and what it has written: read and changed as one, under its turn."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace
from redis.asyncio.client import Pipeline
from rq.job import Job as RqJob

from scorepool import store, wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.lines import Ended, LineInProgress
from scorepool.api.dialects.openai.batch import Batch, BatchUsage, RequestCounts
from scorepool.api.repositories.batches import BatchProgress
from scorepool.api.repositories.files import pack
from scorepool.api.repositories.jobs import status_of
from scorepool.api.state import State

LET_GO_S = 60  # how long jobs whose line is written are kept


class BatchStore:
    def __init__(self, parts: State, turn: BatchLease) -> None:
        self.parts = parts
        self.turn = turn
        self.lines_key = store.Keys.batch_lines(turn.id)

    @property
    def batch(self) -> Batch:
        return self.turn.progress.batch

    async def held(self) -> list[LineInProgress]:
        """Lines that have jobs, in their order."""
        fields: Any = await self.parts.redis.hkeys(self.lines_key)
        return sorted(filter(None, map(LineInProgress.read, fields)))

    async def texts(self, held: Sequence[LineInProgress]) -> list[bytes]:
        if not held:
            return []
        texts: Any = await self.parts.redis.hmget(self.lines_key, [str(one) for one in held])
        return list(texts)

    async def statuses(self, held: Sequence[LineInProgress]) -> list[list[wire.Status | None]]:
        """Of every job of every line; None for one that is not there."""
        ids = [one.job_ids(self.turn.id) for one in held]
        async with self.parts.redis.pipeline(transaction=False) as pipeline:
            for of_line in ids:
                for id_ in of_line:
                    pipeline.hget(RqJob.key_for(id_), "status")
            found: Any = iter(await pipeline.execute())
        return [[status_of(status) if (status := next(found)) else None for _ in of_line] for of_line in ids]

    async def write(
        self,
        progress: BatchProgress,
        entries: Sequence[Ended],
        dropped: Sequence[LineInProgress] = (),
        taken: Mapping[LineInProgress, bytes] | None = None,
    ) -> None:
        """Entries go into their files, lines come and go, and the counts follow: all or nothing. Raises LeaseLost."""
        good = b"".join(one.text for one in entries if one.usage is not None)
        bad = b"".join(one.text for one in entries if one.usage is None)
        batch = replace(
            progress.batch,
            request_counts=_counted(progress.batch.request_counts, entries),
            usage=_added(progress.batch.usage, entries),
        )
        after = replace(
            progress,
            batch=batch,
            output_parts=progress.output_parts + bool(good),
            output_bytes=progress.output_bytes + len(good),
            error_parts=progress.error_parts + bool(bad),
            error_bytes=progress.error_bytes + len(bad),
        )

        def write(pipeline: Pipeline) -> None:
            if good:
                key = store.Keys.file_parts(file_id(self.turn.id, "output"))
                pipeline.hset(key, str(progress.output_parts), pack(good))
            if bad:
                key = store.Keys.file_parts(file_id(self.turn.id, "error"))
                pipeline.hset(key, str(progress.error_parts), pack(bad))
            if taken:
                pipeline.hset(self.lines_key, mapping={str(one): text for one, text in taken.items()})
            for one in dropped:
                pipeline.hdel(self.lines_key, str(one))
                for id_ in one.job_ids(self.turn.id):
                    for key in (RqJob.key_for(id_), store.Keys.request(id_), store.Keys.outcome(id_)):
                        pipeline.expire(key, LET_GO_S)

        await self.turn.commit(after, write)


def file_id(batch_id: str, kind: Literal["output", "error"]) -> str:
    return f"file-{hashlib.blake2b(f'{batch_id} {kind}'.encode(), digest_size=16).hexdigest()}"


def _counted(counts: RequestCounts, entries: Sequence[Ended]) -> RequestCounts:
    num_good = sum(one.usage is not None for one in entries)
    return RequestCounts(
        total=counts.total, completed=counts.completed + num_good, failed=counts.failed + len(entries) - num_good
    )


def _added(usage: BatchUsage, entries: Sequence[Ended]) -> BatchUsage:
    used = [usage, *(one.usage for one in entries if one.usage is not None)]
    num_in, num_out = sum(one.input_tokens for one in used), sum(one.output_tokens for one in used)
    return BatchUsage(input_tokens=num_in, output_tokens=num_out, total_tokens=num_in + num_out)
