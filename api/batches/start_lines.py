"""Start lines: read them, record them as in progress, then queue their jobs. A recorded line cannot get lost.

Lines are started a window at a time, and the jobs of a window are queued in the order of what their prompts begin with,
also those for which there is no room yet: workers compute a prefix once, and continue sequences that share it together.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace
from redis.exceptions import RedisError

from scorepool import wire
from scorepool.api.batches import lines
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.batch_store import BatchStore
from scorepool.api.batches.lines import EndedLine, Ending, LineInProgress
from scorepool.api.batches.services import BatchServices
from scorepool.api.batches.validate import split_lines
from scorepool.api.http import tasks
from scorepool.api.http.errors import ApiError, QueueFull, TooLarge, Unavailable
from scorepool.api.repositories.batches import BatchProgress
from scorepool.store.clock import clock_s

MAX_JOBS = 1024  # of one batch at once
MIN_JOBS = 512  # at which the next window is started: enough for eight workers, and the next batch waits little
WINDOW_BYTES = 16 * 2**20  # of lines whose jobs are in memory at once, and one chunk more
MAX_ENDED_LINES = 500  # lines that end without a job, in one write
CHECK_S = 0.05  # between checks of the lease: jobs that are queued after a cancellation are canceled by nobody
QUEUE_S = 1.0  # how long jobs are queued until answers are collected again: clients read them while the batch runs


Jobs = dict[LineInProgress, tuple[bytes, list[wire.Request]]]  # lines with their jobs


class Started(NamedTuple):
    """Hold the lines of one chunk that were read: those with jobs, those that wait, and those that ended without."""

    progress: BatchProgress
    jobs: Jobs
    waiting: dict[LineInProgress, bytes]  # until a server that does not answer is back
    ended: list[EndedLine]


async def resubmit(services: BatchServices, batch_store: BatchStore) -> Literal["all", "some", "none"]:
    """Queue recorded lines whose jobs do not exist: the queue was full, time was up, or a driver or a server died.

    Return which of them were queued or refused, of those whose server answers. Raise LeaseLost.
    """
    in_progress = await batch_store.in_progress()
    statuses = await batch_store.statuses(in_progress)
    missing = [line for line, found in zip(in_progress, statuses, strict=True) if None in found]
    texts = dict(zip(missing, await batch_store.texts(missing), strict=True))
    in_groups = await _in_groups(texts)
    until = clock_s() + QUEUE_S  # without the time of reading, and one line at least: else none might ever be queued
    num_seen = num_done = 0
    full = set[str]()
    for line in in_groups:
        if line.tag in full:
            continue
        if num_seen and clock_s() > until:
            return "some" if num_done else "none"
        num_seen += 1
        unique_id = line.job_ids(batch_store.lease.batch_id)[0]
        try:
            requests, silent = await lines.to_jobs(services, texts[line], batch_store.batch, unique_id)
            if silent is not None:
                continue
            await batch_store.lease.check(CHECK_S)
            if not await _submit(services, batch_store.lease, line, requests):
                full.add(line.tag)
                continue
        except (wire.Invalid, ApiError) as error:
            refused = lines.refused_line(texts[line], error, unique_id)
            await batch_store.write(batch_store.lease.progress, [refused], removed=[line])
        num_done += 1
    if full:
        return "some" if num_done else "none"
    return "all"


async def start_lines(services: BatchServices, batch_store: BatchStore, ending: Ending | None) -> bool:
    """Read a window of lines if there is room, and queue what QUEUE_S allows; return False if none was read.

    Lines of a batch that is ending get no jobs, so there always is room for them. Raise LeaseLost.
    """
    num_jobs = sum(line.num_jobs for line in await batch_store.in_progress())
    if num_jobs > MIN_JOBS and ending is None:
        return False
    window: Jobs = {}
    has_started = await _read_window(services, batch_store, ending, MAX_JOBS - num_jobs, window)
    until, full = clock_s() + QUEUE_S, set[str]()  # tags of servers that take no more
    for line in await _in_groups({line: text for line, (text, _) in window.items()}):
        if clock_s() > until:
            break
        if line.tag in full:
            continue
        await batch_store.lease.check(CHECK_S)
        try:
            if not await _submit(services, batch_store.lease, line, window[line][1]):
                full.add(line.tag)
        except TooLarge:
            break  # `resubmit` ends the line
    return has_started


async def _read_window(
    services: BatchServices, batch_store: BatchStore, ending: Ending | None, num_free: int, window: Jobs
) -> bool:
    """Record lines as in progress and add them to the window; return False if no line was left. Raise LeaseLost."""
    has_started, num_bytes, lease = False, 0, batch_store.lease
    while num_free > 0 and num_bytes < WINDOW_BYTES and not lease.progress.is_read:
        chunk = await services.files.read_chunk(lease.batch.input_file_id, lease.progress.chunk)
        if chunk is None:
            await lease.commit(replace(lease.progress, is_read=True))
            break
        started = await _start_chunk(services, lease, chunk, num_free, ending)
        texts = {line: text for line, (text, _) in started.jobs.items()} | started.waiting
        await batch_store.write(started.progress, started.ended, started=texts)
        window.update(started.jobs)
        num_free -= sum(line.num_jobs for line in texts)
        num_bytes += sum(map(len, texts.values()))
        has_started = True
    return has_started


async def _in_groups(texts: Mapping[LineInProgress, bytes]) -> list[LineInProgress]:
    """Return lines in the order of what their prompts begin with; those that begin alike in the order of the file."""
    keys = {line: (lines.beginning(texts[line]), line) async for line in tasks.in_turns(texts)}
    return sorted(texts, key=keys.__getitem__)


async def _start_chunk(
    services: BatchServices, lease: BatchLease, chunk: bytes, num_free: int, ending: Ending | None
) -> Started:
    """Parse lines of a chunk while there is room and a third of the lease is not over, at least one."""
    before = lease.progress
    texts = split_lines(chunk)
    ended: list[EndedLine] = []
    jobs, waiting = Jobs(), dict[LineInProgress, bytes]()
    line, number = before.line, before.line_number
    while line < len(texts) and num_free > 0 and len(ended) < MAX_ENDED_LINES:
        await asyncio.sleep(0)  # others have a turn after each line
        if line > before.line and lease.should_renew:
            break
        text, line, number = texts[line], line + 1, number + 1
        if not text:
            continue
        started = await _start_line(services, lease, text, number, ending)
        if isinstance(started, EndedLine):
            ended.append(started)
            continue
        requests, silent = started
        in_progress = LineInProgress(number, len(requests), _tag(services, requests, silent))
        if silent is None:
            jobs[in_progress] = (text, requests)
        else:
            waiting[in_progress] = text
        num_free -= len(requests)
    is_whole = line == len(texts)
    progress = replace(
        before,
        chunk=before.chunk + is_whole,
        line=0 if is_whole else line,
        line_number=number,
        num_started=before.num_started + len(ended) + len(jobs) + len(waiting),
    )
    return Started(progress, jobs, waiting, ended)


def _tag(services: BatchServices, requests: Sequence[wire.Request], silent: int | None) -> str:
    """Return the tag of the server of a line's jobs; of the `silent` one, if that must answer before it is known."""
    if silent is not None:
        return services.line_jobs.servers.servers[silent].tag
    return services.line_jobs.tag(services.models.resolve_names(requests[:1])[0]) if requests else ""


async def _start_line(
    services: BatchServices, lease: BatchLease, text: bytes, number: int, ending: Ending | None
) -> EndedLine | tuple[list[wire.Request], int | None]:
    unique_id = lines.job_id_of(lease.batch_id, number, 0)
    if ending is not None:
        return lines.unexecuted_line(text, ending, unique_id)
    try:
        return await lines.to_jobs(services, text, lease.batch, unique_id)
    except (wire.Invalid, ApiError) as error:
        return lines.refused_line(text, error, unique_id)


async def _submit(
    services: BatchServices, lease: BatchLease, line: LineInProgress, requests: Sequence[wire.Request]
) -> bool:
    """Queue the jobs of a line; jobs that exist stay unchanged.

    Return False if the queue is full or lacks replicas, or if another server than home does not answer. Raise TooLarge
    for a line that never fits.
    """
    job_ids = line.job_ids(lease.batch_id)
    try:
        await services.models.serving(request.model for request in requests)
        await services.submission.enqueue(lease.owner, requests, job_ids, lease.batch_id, batch_id=lease.batch_id)
    except (QueueFull, Unavailable):
        return False
    except (RedisError, OSError):
        if not line.tag:
            raise
        return False
    return True
