"""Show jobs, one job with its tokens, and what can be done with it."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from scorepool import wire
from scorepool.api.dependencies import Cursor, JobsDep, QueueDep, SubmissionDep, WaitingDep, WebhookDeliveriesDep
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.page.live import LiveDep, live_reply
from scorepool.api.page.rendering import HEADERS, PageRoute, html, render
from scorepool.api.page.sequences import ROWS_PER_PAGE, Order, list_sequences
from scorepool.api.page.tokens import MAX_INLINE_TOKENS, MAX_SHOWN, Scale, show_sequence
from scorepool.api.page.viewer import OwnOrigin, SessionCheckDep, Viewer, ViewerDep, ViewerResultsDep
from scorepool.api.repositories.jobs import ENDED, JobFilter
from scorepool.store import Keys

router = APIRouter(route_class=PageRoute, include_in_schema=False)
JOBS_PER_PAGE = 50
STATUSES: Sequence[wire.Status] = ("queued", "started", "finished", "failed", "canceled")
MAX_CLASSIFIED = 200  # items of a classify job
MAX_SHOWN_REQUEST = 20_000  # characters of its JSON

MinuteInUtc = Annotated[str, Query(max_length=32)]
JobId = Annotated[str, Path(alias="id")]


async def job_viewer(job_id: JobId, viewer: ViewerDep, jobs: JobsDep, owner: str | None = None) -> Viewer:
    """Return who looks at a job, which is found without the query if it is another owner's."""
    return viewer.of_owner(await jobs.owner(job_id)) if viewer.is_operator and owner is None else viewer


JobViewerDep = Annotated[Viewer, Depends(job_viewer)]


@router.get("/jobs")
async def jobs(
    viewer: ViewerDep,
    jobs: JobsDep,
    status: Annotated[wire.Status | Literal[""], Query()] = "",
    model: Annotated[str, Query(max_length=128)] = "",
    kind: Annotated[wire.Kind | Literal[""], Query()] = "",
    created_from: MinuteInUtc = "",
    created_before: MinuteInUtc = "",
    everyone: Literal["yes", ""] = "",
    cursor: Cursor = None,
) -> Response:
    """List jobs, newest first: of one owner, or of everyone whose jobs the viewer may see."""
    times = _unix_s(created_from, "created_from"), _unix_s(created_before, "created_before")
    wanted = JobFilter(status or None, model or None, kind or None, *times)
    owners = viewer.owners if everyone else [viewer.owner]
    found, next_cursor = await jobs.page_of_all(owners, cursor, JOBS_PER_PAGE, wanted)
    given = {"status": status, "model": model, "kind": kind, "created_from": created_from}
    given |= {"created_before": created_before, "owner": viewer.owner if viewer.query else "", "everyone": everyone}
    filters = {name: value for name, value in given.items() if value}
    return html(
        "jobs.html",
        viewer=viewer,
        rows=found,
        next_cursor=next_cursor,
        statuses=STATUSES,
        kinds=get_args(wire.Kind),
        filters=filters,
        newest=urlencode(filters),
        older=urlencode(filters | {"cursor": next_cursor or ""}),
        is_first=cursor is None,
    )


def _unix_s(minute: str, field: str) -> float | None:
    """Return the unix time that a field of a form gives in UTC; None if it is empty. Raises BadRequest."""
    if not minute:
        return None
    try:
        return datetime.fromisoformat(minute).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise BadRequest(f"{field}: expected a time as 2026-01-31T09:30, found {wire.quote(minute)}", field) from None


@router.get("/jobs/{id}")
async def job(
    job_id: JobId,
    viewer: JobViewerDep,
    jobs: JobsDep,
    deliveries: WebhookDeliveriesDep,
    held: ViewerResultsDep,
    waiting: WaitingDep,
    sequence: Annotated[int, Query(ge=0)] = 0,
    start: Annotated[int, Query(ge=0)] = 0,
    by: Annotated[Scale, Query()] = "logprob",
    first: Annotated[int, Query(ge=0)] = 0,
    order: Order = "place",
) -> Response:
    """Show a job: its request, its hops, its result, its webhook."""
    found = await jobs.read(viewer.owner, job_id, held)
    request = await jobs.read_request(viewer.owner, job_id)
    try:
        delivery = await deliveries.read(viewer.owner, Keys.delivery(job_id))
    except NotFound:
        delivery = None
    num_sequences = len(found.result.sequences) if found.result else 0
    if num_sequences and sequence >= num_sequences:
        raise BadRequest(f"sequence: expected 0 to {num_sequences - 1}, found {sequence}", "sequence")

    def render_page() -> Response:
        sequences = found.result.unpacked().sequences if found.result else []
        return html(
            "job.html",
            viewer=viewer,
            job=found,
            request=None if request is None else shown_request(request),
            delivery=delivery,
            has_ended=found.status in ENDED,
            progress=waiting.progress.latest(job_id),
            sequence_number=sequence,
            num_sequences=num_sequences,
            by=by,
            classified=found.result.classifications[:MAX_CLASSIFIED] if found.result else [],
            num_classified=len(found.result.classifications) if found.result else 0,
            shown=show_sequence(sequences[sequence], by, start) if sequences else None,
            max_shown=MAX_SHOWN,
            listed=list_sequences(sequences, order, first),
            rows_per_page=ROWS_PER_PAGE,
        )

    num_tokens = found.result.num_tokens if found.result else 0
    return await held.rendered(render_page, is_large=num_tokens > MAX_INLINE_TOKENS)


@router.get("/jobs/{id}/events")
async def events(
    job_id: JobId,
    request: Request,
    viewer: JobViewerDep,
    jobs: JobsDep,
    live: LiveDep,
    waiting: WaitingDep,
    session_goes_on: SessionCheckDep,
) -> Response:
    """Send the part of the page that changes until the job has ended. The browser loads the page again then."""
    await jobs.read_state(viewer.owner, job_id)  # while an error can have a status

    async def fragment() -> tuple[str, bool]:
        job = await jobs.read_state(viewer.owner, job_id)
        has_ended, progress = job.status in ENDED, waiting.progress.latest(job_id)
        return render("job_state.html", viewer=viewer, job=job, has_ended=has_ended, progress=progress), has_ended

    key = (job_id, viewer.owner, viewer.query)
    return live_reply(request, live.changes("job", key, fragment, session_goes_on))


def shown_request(request: wire.Request) -> str:
    """Return a request as JSON, cut if it is long."""
    text = wire.encode_json(request).decode()
    return text if len(text) <= MAX_SHOWN_REQUEST else f"{text[:MAX_SHOWN_REQUEST]} ... ({len(text):,} characters)"


@router.post("/jobs/{id}/cancel", dependencies=[OwnOrigin])
async def cancel(job_id: JobId, viewer: JobViewerDep, queue: QueueDep) -> Response:
    """Cancel a job. One that has ended meanwhile is shown as it is."""
    with suppress(Conflict):
        await queue.cancel(viewer.owner, job_id)
    return _see(f"/jobs/{job_id}", viewer)


@router.post("/jobs/{id}/delete", dependencies=[OwnOrigin])
async def delete(job_id: JobId, viewer: JobViewerDep, queue: QueueDep) -> Response:
    """Delete a job that has ended."""
    await queue.delete(viewer.owner, job_id)
    return _see("/jobs", viewer)


@router.post("/jobs/{id}/retry", dependencies=[OwnOrigin])
async def retry(job_id: JobId, viewer: JobViewerDep, jobs: JobsDep, submission: SubmissionDep) -> Response:
    """Submit the job's request again, as a new job."""
    request = await jobs.read_request(viewer.owner, job_id)
    if request is None:
        raise NotFound("the request of this job is not kept any more", "id")
    [submitted] = await submission.submit(viewer.owner, [request], None, is_bulk=False)
    return _see(f"/jobs/{submitted.id}", viewer)


def _see(path: str, viewer: Viewer) -> Response:
    return RedirectResponse(path + viewer.query, 303, HEADERS)
