"""/v1/webhooks/endpoints: who is told of every job of an owner, and /v1/webhooks/test."""

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, ReplyFormat, known_query
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import NotFound
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], dependencies=[Depends(known_query)])

BODY_ERRORS = (400, 401, 404, 406, 408, 413, 415, 503)


@router.post(
    "/endpoints",
    status_code=201,
    summary="Register an endpoint",
    responses=openapi.answers({201: wire.WebhookSecret}, (400, 401, 406, 408, 409, 413, 415, 503)),
    openapi_extra=openapi.body(wire.EndpointRegistration),
)
async def register(request: Request, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """It is told of every job of yours that ends from now on. Its secret is shown in this answer only."""
    registration = await read_message(request, wire.EndpointRegistration, parts.settings.max_body_bytes)
    registered = await parts.endpoints.register(owner, registration)
    return reply(registered, form, 201, {"Location": f"/v1/webhooks/endpoints/{registered.endpoint.id}"})


@router.get(
    "/endpoints",
    summary="List endpoints",
    responses=openapi.answers({200: wire.WebhookEndpoints}, (400, 401, 406, 503)),
)
async def all_endpoints(owner: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """Yours, the oldest first."""
    return reply(wire.WebhookEndpoints(endpoints=await parts.endpoints.all(owner)), form)


@router.get(
    "/endpoints/{id}",
    summary="Read an endpoint",
    responses=openapi.answers({200: wire.WebhookEndpoint}, (400, 401, 404, 406, 503)),
)
async def read(id: str, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """`disabled_at` and `disabled_reason` say whether and why it is told nothing."""
    return reply(await parts.endpoints.read(owner, id), form)


@router.patch(
    "/endpoints/{id}",
    summary="Change an endpoint",
    responses=openapi.answers({200: wire.WebhookEndpoint}, BODY_ERRORS),
    openapi_extra=openapi.body(wire.EndpointChange),
)
async def change(id: str, request: Request, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """Deliveries that are still to be tried go to the new URL. `disabled`: false enables one that answered 410."""
    message = await read_message(request, wire.EndpointChange, parts.settings.max_body_bytes)
    return reply(await parts.endpoints.change(owner, id, message), form)


@router.delete(
    "/endpoints/{id}",
    status_code=204,
    summary="Delete an endpoint",
    responses=openapi.answers({}, (400, 401, 404, 503)),
)
async def delete(id: str, owner: Owner, parts: Parts) -> Response:  # noqa: A002
    """Deliveries to it that are still to be tried will fail."""
    await parts.endpoints.delete(owner, id)
    return Response(status_code=204)


@router.post(
    "/endpoints/{id}/secret",
    summary="Rotate an endpoint's secret",
    responses=openapi.answers({200: wire.WebhookSecret}, (400, 401, 404, 406, 503)),
)
async def rotate(id: str, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """Shown in this answer only. For a day deliveries carry two signatures, by the new and by the old secret."""
    return reply(await parts.endpoints.rotate(owner, id), form)


@router.post(
    "/test",
    status_code=202,
    summary="Send a test event",
    responses=openapi.answers({202: wire.Delivery}, (*BODY_ERRORS, 409)),
    openapi_extra=openapi.body(wire.TestEventRequest),
)
async def test(request: Request, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """An event of the type `webhook.test`, delivered as every other; follow it at `Location`."""
    message = await read_message(request, wire.TestEventRequest, parts.settings.max_body_bytes)
    try:
        endpoint = await parts.endpoints.read(owner, message.endpoint_id)
    except NotFound as error:
        raise NotFound(error.message, "endpoint_id") from None
    delivery = await parts.deliveries.test(owner, endpoint)
    return reply(delivery, form, 202, {"Location": f"/v1/webhooks/deliveries/{delivery.id}"})
