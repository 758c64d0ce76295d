"""Collect the outcomes of lines: results of their jobs, or the reasons why there are none."""

import asyncio
from collections.abc import Iterator, Sequence

from scorepool import wire
from scorepool.api.batches import lines
from scorepool.api.batches.batch_store import BatchStore
from scorepool.api.batches.lines import EndedLine, Ending, LineInProgress
from scorepool.api.batches.services import BatchServices
from scorepool.api.http.bodies import MAX_INLINE_BYTES
from scorepool.api.http.errors import BadRequest, NotFound, Unavailable
from scorepool.api.http.large_replies import own_results
from scorepool.api.repositories.jobs import ENDED

GROUP = 16  # lines whose results are in memory at once
GROUP_BYTES = 2**22  # of these results, as they are stored
CANCEL_TIMEOUT_S = 60  # how long jobs may go on running after their batch was cancelled or expired


async def cancel_jobs(services: BatchServices, batch_store: BatchStore) -> None:
    """Cancel all jobs of the batch: queued jobs end at once, running ones as soon as their worker sees it."""
    lease, silent = batch_store.lease, set[str]()  # tags of servers that do not answer
    for line in await batch_store.in_progress():
        if line.tag in silent:
            continue
        if not await services.submission.cancel_all(lease.owner, line.job_ids(lease.batch_id)):
            silent.add(line.tag)


async def collect(services: BatchServices, batch_store: BatchStore, ending: Ending | None) -> bool:
    """Write the output of lines whose jobs have all ended; return whether there was any. Raise LeaseLost."""
    num_written = 0
    in_progress = await batch_store.in_progress()
    statuses = await batch_store.statuses(in_progress)
    done = ENDED if ending is None else (*ENDED, None)  # a batch that ends does not wait for jobs that do not exist
    ended = [line for line, found in zip(in_progress, statuses, strict=True) if all(status in done for status in found)]
    for group in _groups(ended, await batch_store.outcome_bytes(ended)):
        texts = await batch_store.texts(group)
        outputs = await asyncio.gather(
            *(_ended_line(services, batch_store, line, text, ending) for line, text in zip(group, texts, strict=True))
        )
        by_line = {line: output for line, output in zip(group, outputs, strict=True) if output is not None}
        if by_line:
            await batch_store.write(batch_store.lease.progress, list(by_line.values()), removed=list(by_line))
            num_written += len(by_line)
    return num_written > 0


def _groups(ended: Sequence[LineInProgress], sizes: Sequence[int]) -> Iterator[list[LineInProgress]]:
    """Divide lines into groups whose results are in memory at once. A large one has a group of its own."""
    group: list[LineInProgress] = []
    num_bytes = 0
    for line, size in zip(ended, sizes, strict=True):
        if group and (len(group) == GROUP or num_bytes + size > GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(line)
        num_bytes += size
    if group:
        yield group


async def _ended_line(
    services: BatchServices, batch_store: BatchStore, line: LineInProgress, text: bytes, ending: Ending | None
) -> EndedLine | None:
    """Return the output of a line; None if there is none yet.

    Its jobs were just deleted, so they are submitted again; or the result store does not answer.
    """
    lease = batch_store.lease
    job_ids = line.job_ids(lease.batch_id)
    try:
        with own_results(lease.owner) as held:
            jobs = await asyncio.gather(*(services.jobs.read(lease.owner, job_id, held) for job_id in job_ids))
            is_large = len(text) > MAX_INLINE_BYTES
            return await held.run(lambda: lines.ended_line(text, batch_store.batch, jobs, ending), is_large=is_large)
    except Unavailable:
        return None
    except NotFound:
        return None if ending is None else lines.unexecuted_line(text, ending, job_ids[0])
    except (wire.Invalid, BadRequest) as error:
        return lines.refused_line(text, error, job_ids[0])


async def fail_stuck_lines(batch_store: BatchStore, ending: Ending) -> None:
    """Fail lines whose jobs do not end CANCEL_TIMEOUT_S after the end of the batch: their worker may be gone.

    Lines whose jobs have ended wait for a result store that does not answer, until their results expire.
    """
    lease = batch_store.lease
    ended_at = lease.cancel_at if ending == "cancelled" else batch_store.batch.expires_at
    if ended_at is None or lease.now < ended_at + CANCEL_TIMEOUT_S:
        return
    in_progress = await batch_store.in_progress()
    statuses = await batch_store.statuses(in_progress)
    stuck = [line for line, found in zip(in_progress, statuses, strict=True) if not set(found) <= set(ENDED)]
    if not stuck:
        return
    texts = await batch_store.texts(stuck)
    failed = [
        lines.unexecuted_line(text, ending, line.job_ids(lease.batch_id)[0])
        for text, line in zip(texts, stuck, strict=True)
    ]
    await batch_store.write(lease.progress, failed, removed=stuck)
