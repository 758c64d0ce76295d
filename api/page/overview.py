"""Show queues, workers, failures and webhooks, live."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from scorepool import store, wire
from scorepool.api.dependencies import HistoryDep
from scorepool.api.http.errors import TooManyEvents
from scorepool.api.http.sse import EventStream
from scorepool.api.metrics.history import tokens_per_s
from scorepool.api.metrics.queue_snapshot import QueueSnapshot, QueueSnapshots
from scorepool.api.page.formatting import percent
from scorepool.api.page.rendering import HEADERS, PageRoute, html, render
from scorepool.api.page.viewer import SessionCheck, SessionCheckDep, ViewerDep
from scorepool.api.repositories.models import Models

router = APIRouter(route_class=PageRoute, include_in_schema=False)
REFRESH_S = 2.0
MAX_OPEN = 2000  # pages that one process keeps up to date
RETRY_S = 30


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue as the table shows it."""

    name: str
    queued: int
    running: int
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the table shows it."""

    served: wire.ServedModel
    state: str

    @property
    def batch(self) -> str:
        load = self.served.load
        return f"{load.running_rows}/{load.max_running_rows}" if load else "–"

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.served)

    @property
    def kv(self) -> str:
        load = self.served.load
        return percent(load.cached_tokens, load.max_cached_tokens) if load else "–"


def overview_of(snapshot: QueueSnapshot, live: Sequence[wire.ServedModel]) -> dict[str, Any]:
    """Return what the template shows."""
    queues = [
        QueueRow(
            name,
            counts["queued"],
            counts["started"],
            snapshot.oldest_s.get(name) if counts["queued"] else None,
        )
        for name, counts in sorted(snapshot.jobs.items())
        if name != store.WEBHOOKS
    ]
    failures = {code: number for code, number in snapshot.outcomes.items() if code != "result" and number}
    return {
        "queues": queues,
        "workers": [WorkerRow(one, state_of(one)) for one in live],
        "num_queued": sum(row.queued for row in queues),
        "num_running": sum(row.running for row in queues),
        "num_results": snapshot.outcomes.get("result", 0),
        "failures": failures,
        "deliveries": snapshot.deliveries,
        "tokens_per_s": sum(map(tokens_per_s, live)),
    }


def state_of(served: wire.ServedModel) -> str:
    """Say whether a worker takes jobs, and what slows it."""
    if not served.takes_jobs:
        return "stopped by a crosscheck"
    return "ok" if served.load is None else served.load.state


class OverviewFeed:
    """The fragment of the page that changes, rendered once for all who look."""

    def __init__(self, snapshots: QueueSnapshots, models: Models) -> None:
        self._snapshots, self._models = snapshots, models
        self._rendered: tuple[QueueSnapshot, str] | None = None
        self._num_open = 0

    async def values(self) -> dict[str, Any]:
        """Return what the fragment shows, from the latest snapshot. Raises RedisError."""
        return overview_of(await self._snapshots.latest(), await self._models.live())

    async def _fragment(self) -> str:
        snapshot = await self._snapshots.latest()
        if self._rendered is None or self._rendered[0] is not snapshot:
            values = overview_of(snapshot, await self._models.live())
            self._rendered = snapshot, render("overview_live.html", **values)
        return self._rendered[1]

    async def changes(self, session_goes_on: SessionCheck) -> AsyncGenerator[bytes | None]:
        """Yield an event whenever the fragment changes, until the session ends. Who reads slowly misses some."""
        if self._num_open >= MAX_OPEN:
            raise TooManyEvents(f"{MAX_OPEN} pages of this server are open", RETRY_S)
        self._num_open += 1
        shown = ""
        try:
            while True:
                if not await session_goes_on():
                    yield event("overview", render("session_ended.html")) + event("ended", "session")
                    return
                fragment = await self._fragment()
                yield None if fragment == shown else event("overview", fragment)
                shown = fragment
                await asyncio.sleep(REFRESH_S)
        finally:
            self._num_open -= 1


def event(name: str, text: str) -> bytes:
    """Encode a server-sent event, whose data may have several lines."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode()


async def feed(request: Request) -> OverviewFeed:
    """Return the feed of this process."""
    return request.app.state.overview_feed  # type: ignore[no-any-return]


FeedDep = Annotated[OverviewFeed, Depends(feed)]


@router.get("/")
async def overview(viewer: ViewerDep, feed: FeedDep) -> Response:
    """Show the page."""
    return html("overview.html", viewer=viewer, **await feed.values())


@router.get("/overview/events")
async def events(request: Request, _: ViewerDep, feed: FeedDep, session_goes_on: SessionCheckDep) -> Response:
    """Send the part of the page that changes."""
    stream = EventStream(request, feed.changes(session_goes_on), last=b"")
    stream.headers.update(HEADERS)
    return stream


@router.get("/overview/history")
async def history(_: ViewerDep, history: HistoryDep) -> Response:
    """Give the last hour, for the chart."""
    return Response(wire.encode_json(await history.last_hour()), headers=HEADERS, media_type="application/json")
