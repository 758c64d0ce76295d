"""/v1/webhooks/deliveries: what became of each event, and how to send it again."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Cursor, Limit, Owner, Parts, ReplyFormat, known_query
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/webhooks/deliveries", tags=["webhooks"], dependencies=[Depends(known_query)])


@router.get(
    "",
    summary="List deliveries, newest first",
    responses=openapi.answers({200: wire.DeliveryPage}, (400, 401, 406, 503)),
)
async def page(
    owner: Owner,
    form: ReplyFormat,
    parts: Parts,
    state: Annotated[wire.DeliveryState | None, Query()] = None,
    endpoint_id: Annotated[str | None, Query(max_length=64)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Response:
    """Each with its last attempt. A filter that matches little can give a short page that still has a `next_cursor`."""
    return reply(await parts.deliveries.page(owner, state, endpoint_id, cursor, limit), form)


@router.get(
    "/{id}",
    summary="Read a delivery with its attempts",
    responses=openapi.answers({200: wire.Delivery}, (400, 401, 404, 406, 503)),
)
async def read(id: str, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """`id` is the `webhook-id` that the receiver saw."""
    return reply(await parts.deliveries.read(owner, id), form)


@router.post(
    "/{id}/replay",
    status_code=202,
    summary="Send an event again",
    responses=openapi.answers({202: wire.Delivery}, (400, 401, 404, 406, 409, 503)),
)
async def replay(id: str, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """At once, under the same `webhook-id`, and by the whole schedule again if that fails. 409: it is on its way."""
    return reply(await parts.deliveries.replay(owner, id), form, 202)


@router.post(
    "/replay",
    status_code=202,
    summary="Send failed events again",
    responses=openapi.answers({202: wire.ReplayReply}, (400, 401, 406, 408, 413, 415, 503)),
    openapi_extra=openapi.body(wire.ReplayRequest),
)
async def replay_failed(request: Request, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """All of yours that failed since a time, or those of one endpoint."""
    message = await read_message(request, wire.ReplayRequest, parts.settings.max_body_bytes)
    return reply(wire.ReplayReply(replayed=await parts.deliveries.replay_failed(owner, message)), form, 202)
