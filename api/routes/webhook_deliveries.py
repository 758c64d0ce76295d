"""Serve /v1/webhooks/deliveries: the state of each event, and replays."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    Cursor,
    HeldResultsDep,
    Limit,
    Owner,
    ReplyFormat,
    SettingsDep,
    WebhookDeliveriesDep,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/webhooks/deliveries", tags=["webhooks"], dependencies=[Depends(known_query)])

DeliveryId = Annotated[str, Path(alias="id")]


@router.get(
    "",
    summary="List deliveries, newest first",
    responses=openapi.responses({200: wire.DeliveryPage}, (400, 401, 406, 429, 503)),
)
async def page(
    owner: Owner,
    reply_format: ReplyFormat,
    deliveries: WebhookDeliveriesDep,
    held: HeldResultsDep,
    state: Annotated[wire.DeliveryState | None, Query()] = None,
    endpoint_id: Annotated[str | None, Query(max_length=64)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Response:
    """List deliveries, each with its last attempt. With a filter, a short page may still have a `next_cursor`."""
    return held.page(await deliveries.page(owner, state, endpoint_id, cursor, limit), reply_format)


@router.get(
    "/{id}",
    summary="Read a delivery with its attempts",
    responses=openapi.responses({200: wire.Delivery}, (400, 401, 404, 406, 503)),
)
async def read(
    delivery_id: DeliveryId, owner: Owner, reply_format: ReplyFormat, deliveries: WebhookDeliveriesDep
) -> Response:
    """Read a delivery. `id` is the `webhook-id` that the receiver got."""
    return reply(await deliveries.read(owner, delivery_id), reply_format)


@router.post(
    "/{id}/replay",
    status_code=202,
    summary="Send an event again",
    responses=openapi.responses({202: wire.Delivery}, (400, 401, 404, 406, 409, 429, 503)),
)
async def replay(
    delivery_id: DeliveryId, owner: Owner, reply_format: ReplyFormat, deliveries: WebhookDeliveriesDep
) -> Response:
    """Send an event again, at once and with the same `webhook-id`. If that fails, the schedule of retries follows.

    409: the delivery is still pending.
    """
    return reply(await deliveries.replay(owner, delivery_id), reply_format, 202)


@router.post(
    "/replay",
    status_code=202,
    summary="Send failed events again",
    responses=openapi.responses({202: wire.ReplayReply}, (400, 401, 406, 408, 413, 415, 429, 503)),
    openapi_extra=openapi.request_body(wire.ReplayRequest),
)
async def replay_failed(
    request: Request, owner: Owner, reply_format: ReplyFormat, settings: SettingsDep, deliveries: WebhookDeliveriesDep
) -> Response:
    """Send all your failed events since a time again, or those of one endpoint."""
    message = await read_message(request, wire.ReplayRequest, settings.max_body_bytes)
    return reply(wire.ReplayReply(replayed=await deliveries.replay_failed(owner, message)), reply_format, 202)
