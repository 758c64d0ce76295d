"""Answer operators and their machines: liveness, readiness, metrics. No key is needed."""

import logging
from typing import Literal

from fastapi import APIRouter
from msgspec import UNSET, Struct
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import MetricsDep, ModelsDep, ReadinessDep, SnapshotsDep
from scorepool.api.http import openapi
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.formats import reply
from scorepool.api.metrics.queue_snapshot import QueueSnapshot

logger = logging.getLogger(__name__)
router = APIRouter(tags=["operations"])


class Health(Struct, frozen=True):
    """Say that the process runs."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", summary="Liveness: the process runs", responses=openapi.responses({200: Health}, ()))
async def healthz() -> Response:
    """Answer while the process runs."""
    return reply(Health(), "json")


@router.get(
    "/readyz", summary="Readiness: jobs can be accepted", responses=openapi.responses({200: wire.Ready}, (503,))
)
async def readyz(readiness: ReadinessDep, models: ModelsDep) -> Response:
    """Check that Redis accepts writes and that the reader of ended jobs runs.

    One of several Redis servers suffices, and `unavailable` says what the others keep from working.
    """
    unavailable = await readiness.check()
    await models.live()
    return reply(wire.Ready(models=models.names, unavailable=unavailable or UNSET), "json")


@router.get("/health/", include_in_schema=False)  # TRL's clients use this path until 1.10
@router.get(
    "/health",
    summary="Readiness with a model: requests can be answered",
    responses=openapi.responses({200: wire.Ready}, (503,)),
)
async def health(readiness: ReadinessDep, models: ModelsDep) -> Response:
    """Check that jobs can be accepted and that a live worker serves a model, as vLLM's route of this name does."""
    ready = await readyz(readiness, models)
    if not models.names:
        raise Unavailable("no worker is live")
    return ready


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses={200: {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def read_metrics(snapshots: SnapshotsDep, metrics: MetricsDep) -> Response:
    """Report metrics of this process and, while Redis answers, of queues, workers and webhook deliveries."""
    snapshot: QueueSnapshot | None
    try:
        snapshot = await snapshots.latest()
    except RedisError as error:
        logger.warning("metrics without a snapshot of the queue: %r", error)
        snapshot = None
    return Response(metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)
