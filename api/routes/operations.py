"""What operators and their machines ask: is it up, can it work, how much is waiting. No key is needed."""

import logging
from typing import Literal

from fastapi import APIRouter
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError
from starlette.responses import Response

from scorepool.api.dependencies import Parts
from scorepool.api.http import openapi
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.formats import reply

logger = logging.getLogger(__name__)
router = APIRouter(tags=["operations"])

PROBE = "scorepool:probe"
PROBE_TTL_S = 60


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True):
    models: list[str]  # that live workers serve; may be empty
    status: Literal["ready"] = "ready"


@router.get("/healthz", summary="The process lives", responses=openapi.answers({200: Health}, ()))
async def healthz() -> Response:
    return reply(Health(), "json")


@router.get("/readyz", summary="Jobs can be accepted", responses=openapi.answers({200: Ready}, (503,)))
async def readyz(parts: Parts) -> Response:
    """Redis takes writes, and the reader of ended jobs lives."""
    await parts.redis.set(PROBE, "1", ex=PROBE_TTL_S)
    if not parts.waiting.is_alive:
        raise Unavailable("the stream of ended jobs is not being read")
    await parts.models.cards()
    return reply(Ready(models=parts.models.names), "json")


@router.get("/health/", include_in_schema=False)  # as TRL's clients spelled it until 1.10
@router.get("/health", summary="Requests can be answered", responses=openapi.answers({200: Ready}, (503,)))
async def health(parts: Parts) -> Response:
    """As vLLM's: ready, and some model is served."""
    ready = await readyz(parts)
    if not parts.models.names:
        raise Unavailable("no worker is live")
    return ready


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses={200: {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(parts: Parts) -> Response:
    """Of this process; and of queues, workers and deliveries when Redis answers."""
    try:
        await parts.metrics.readings.read(parts.redis, await parts.models.cards())
        parts.metrics.redis_up.set(1)
    except RedisError as error:
        logger.warning("metrics without what Redis knows: %r", error)
        parts.metrics.readings.forget()
        parts.metrics.redis_up.set(0)
    return Response(parts.metrics.text(), media_type=CONTENT_TYPE_LATEST)
