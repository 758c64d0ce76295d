"""Show queues, workers, failures and webhooks, live."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scorepool import store, wire
from scorepool.api.dependencies import HistoryDep, SnapshotsDep
from scorepool.api.metrics.history import tokens_per_s
from scorepool.api.metrics.queue_snapshot import QueueSnapshot, QueueSnapshots
from scorepool.api.page.formatting import percent, seconds
from scorepool.api.page.live import LiveDep, LiveFragments, live_reply
from scorepool.api.page.rendering import HEADERS, PageRoute, html, render
from scorepool.api.page.viewer import SessionCheck, SessionCheckDep, ViewerDep

router = APIRouter(route_class=PageRoute, include_in_schema=False)
FRESH_HEARTBEAT_S = 30.0
NO_FAILURES = ("result", "canceled")


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
    host: str
    heartbeat: str

    @property
    def state(self) -> str:
        return state_of(self.served)

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


def overview_of(snapshot: QueueSnapshot) -> dict[str, Any]:
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
    failures = {code: number for code, number in snapshot.outcomes.items() if code not in NO_FAILURES and number}
    return {
        "queues": queues,
        "workers": [WorkerRow(one.served, one.host, heartbeat(one.heartbeat_age_s)) for one in snapshot.live],
        "unreachable": snapshot.unreachable,
        "num_queued": sum(row.queued for row in queues),
        "num_running": sum(row.running for row in queues),
        "num_results": snapshot.outcomes.get("result", 0),
        "num_canceled": snapshot.outcomes.get("canceled", 0),
        "failures": failures,
        "deliveries": snapshot.deliveries,
        "tokens_per_s": sum(tokens_per_s(one.served) for one in snapshot.live),
    }


def heartbeat(age_s: float | None) -> str:
    """Say how old a heartbeat is, if it is not fresh: the page would change with each."""
    if age_s is None:
        return "–"
    return f"< {FRESH_HEARTBEAT_S:.0f} s ago" if age_s < FRESH_HEARTBEAT_S else f"{seconds(age_s)} ago"


def state_of(served: wire.ServedModel) -> str:
    """Say whether a worker takes jobs, and what slows it."""
    if not served.takes_jobs:
        return "stopped by a crosscheck"
    return "ok" if served.load is None else served.load.state


@router.get("/")
async def overview(viewer: ViewerDep, snapshots: SnapshotsDep) -> Response:
    """Show the page."""
    values = overview_of(await snapshots.latest())
    return html("overview.html", viewer=viewer, **values)


@router.get("/overview/events")
async def events(
    request: Request,
    _: ViewerDep,
    snapshots: SnapshotsDep,
    live: LiveDep,
    session_goes_on: SessionCheckDep,
) -> Response:
    """Send the part of the page that changes."""
    return live_reply(request, changes(live, snapshots, session_goes_on))


def changes(
    live: LiveFragments, snapshots: QueueSnapshots, session_goes_on: SessionCheck
) -> AsyncGenerator[bytes | None]:
    """Yield the part of the page that changes, whenever it has, as events."""

    async def fragment() -> tuple[str, bool]:
        values = overview_of(await snapshots.latest())
        return render("overview_live.html", **values), False

    return live.changes("overview", "overview", fragment, session_goes_on)


@router.get("/overview/history")
async def history(_: ViewerDep, history: HistoryDep) -> Response:
    """Give the last hour, for the chart."""
    return Response(wire.encode_json(await history.last_hour()), headers=HEADERS, media_type="application/json")
