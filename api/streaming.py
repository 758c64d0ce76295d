"""Stream the events of jobs while they run: for synchronous requests with `stream`, and for /v1/jobs/{id}/events."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from scorepool import wire
from scorepool.api.delta_order import DeltaOrder
from scorepool.api.event_cursor import CursorEvent, EventCursor
from scorepool.api.http import tasks
from scorepool.api.http.errors import begun_again, map_field_names
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.http.sse import KEEP_ALIVE_S
from scorepool.api.http.unsent_events import UnsentEvents, unsent_events
from scorepool.api.metrics.prometheus import Metrics
from scorepool.api.repositories.jobs import ENDED
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.submission import Submission

ASK_AGAIN_S = 3.0  # after a request for missing tokens to which none came

# Deltas that a slow client does not take are dropped. Later ones then leave a gap, for which their worker is asked, and
# the result has them all.
Events = UnsentEvents[wire.TokenDelta | wire.Progress | wire.Job]


class Streaming:
    """Follow an owner's jobs, token by token."""

    def __init__(self, submission: Submission, waiting: Waiting, metrics: Metrics) -> None:
        self._submission = submission
        self._waiting = waiting
        self._metrics = metrics

    async def submit_and_stream(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        job_ids: Sequence[str],
        held: HeldResults,
        map_field: Callable[[str], str],
        idempotency_key: str | None = None,
        kept_body: bytes = b"",
    ) -> AsyncGenerator[wire.TokenDelta | wire.Job | None]:
        """Yield None when the jobs are accepted, then their deltas, and each job when it ends.

        None is yielded again for a delta that is late or waits for others, and after KEEP_ALIVE_S without one. Closing
        this generator early cancels the jobs that have not ended, unless they have an `idempotency_key`: their client
        can ask again. Raises ApiError, with fields as `map_field` names them, also if other weights computed the tokens
        of a job than those before.
        """
        with (
            map_field_names(map_field),
            unsent_events(owner) as events,
            self._waiting.subscribe(job_ids, events.put_or_drop),
            self._metrics.waiting.track_inprogress(),
        ):
            is_bulk = len(requests) > 1
            await self._submission.submit(
                owner,
                requests,
                idempotency_key,
                job_ids,
                is_bulk=is_bulk,
                is_synchronous=True,
                kept_body=kept_body,
            )
            waits = [asyncio.create_task(self._put_end(events, owner, job_id, held)) for job_id in job_ids]
            num_running = len(job_ids)
            orders = {job_id: DeltaOrder() for job_id in job_ids}
            gaps = {job_id: Gaps(self._waiting, job_id) for job_id in job_ids}
            try:
                yield None
                while num_running:
                    event = await _next_event(events)
                    if isinstance(event, wire.Progress):
                        continue
                    if isinstance(event, wire.TokenDelta):
                        if not orders[event.id].admit(event):
                            await gaps[event.id].fill(orders[event.id].missing)
                            event = None
                        elif not orders[event.id].agrees(event.weights):
                            raise begun_again()
                    if isinstance(event, wire.Job):
                        if event.result is None:
                            raise await self._submission.error_of_request(
                                event, requests, job_ids, is_kept=idempotency_key is not None
                            )
                        num_running -= 1
                        if not orders[event.id].agrees(event.result.stamp.weights):
                            raise begun_again()
                    yield event
            finally:
                if num_running and idempotency_key is None:
                    await asyncio.shield(self._submission.cancel_all(owner, job_ids))
                await tasks.cancel_and_wait(waits)

    async def follow(
        self, owner: str, job: wire.Job, cursor: EventCursor, held: HeldResults
    ) -> AsyncGenerator[CursorEvent | wire.Progress | wire.Job | None]:
        """Yield the events of a job after `cursor`: past ones that Redis still holds, then new ones, then the job.

        Of past progress the latest is yielded.

        The job has not ended if the server's longest wait is over first. None is yielded for a delta that has nothing
        to send, and after KEEP_ALIVE_S without one.
        """
        gaps = Gaps(self._waiting, job.id)
        with (
            unsent_events(owner) as events,
            self._waiting.subscribe([job.id], events.put_or_drop),
            self._waiting.progress.subscribe(job.id, events.put_or_drop),
        ):
            wait = asyncio.create_task(self._put_end(events, owner, job.id, held))
            try:
                if job.status not in ENDED:
                    if progress := self._waiting.progress.latest(job.id):
                        yield progress
                    async with aclosing(self._waiting.backfill(owner, job.id, job.created_at or 0.0)) as past:
                        async for delta in past:
                            for cursor_event in cursor.advance(delta):
                                yield cursor_event
                    await gaps.fill(cursor.missing)
                while not isinstance(event := await _next_event(events), wire.Job):
                    if isinstance(event, wire.TokenDelta) and (cursor_events := cursor.advance(event)):
                        for cursor_event in cursor_events:
                            yield cursor_event
                    else:
                        yield event if isinstance(event, wire.Progress) else None
                    await gaps.fill(cursor.missing)
                if event.result is not None and event.kind == "generate":
                    for cursor_event in cursor.finish(event.id, event.result):
                        yield cursor_event
                yield event
            finally:
                await tasks.cancel_and_wait([wait])

    async def _put_end(self, events: Events, owner: str, job_id: str, held: HeldResults) -> None:
        try:
            events.put(await self._submission.until_streamed_job_ended(owner, job_id, held))
        except Exception as error:  # `get` raises it again
            events.put(error)


class Gaps:
    """Ask for the missing tokens of one job."""

    def __init__(self, waiting: Waiting, job_id: str) -> None:
        self._waiting = waiting
        self._job_id = job_id
        self._asked_at: dict[int, float] = {}  # loop time, by sequence

    async def fill(self, missing: Mapping[int, int]) -> None:
        """Ask the job's worker for the tokens of each sequence from an index on, unless it was asked just now."""
        now = asyncio.get_running_loop().time()
        due = [sequence for sequence in missing if now >= self._asked_at.get(sequence, -math.inf) + ASK_AGAIN_S]
        for sequence in due:
            self._asked_at[sequence] = now
        if due:
            await self._waiting.request_tokens(
                [wire.MissingTokens(id=self._job_id, sequence=sequence, first=missing[sequence]) for sequence in due]
            )


async def _next_event(events: Events) -> wire.TokenDelta | wire.Progress | wire.Job | None:
    """Return the next event, or None after KEEP_ALIVE_S of silence. Raise it if it is an exception."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return await events.get()
    except TimeoutError:
        return None
