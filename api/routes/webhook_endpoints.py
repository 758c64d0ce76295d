"""Serve /v1/webhooks/endpoints and /v1/webhooks/test."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    Owner,
    ReplyFormat,
    SettingsDep,
    WebhookDeliveriesDep,
    WebhookEndpointsDep,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import NotFound
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], dependencies=[Depends(known_query)])

EndpointId = Annotated[str, Path(alias="id")]
BODY_ERRORS = (400, 401, 404, 406, 408, 413, 415, 503)


@router.post(
    "/endpoints",
    status_code=201,
    summary="Register an endpoint",
    responses=openapi.responses({201: wire.WebhookSecret}, (400, 401, 406, 408, 409, 413, 415, 503)),
    openapi_extra=openapi.request_body(wire.EndpointRegistration),
)
async def register(
    request: Request, owner: Owner, reply_format: ReplyFormat, settings: SettingsDep, endpoints: WebhookEndpointsDep
) -> Response:
    """Register a URL that receives an event for each of your jobs that ends from now on.

    Synchronous requests (the routes of other APIs) send no events. Only this reply contains the endpoint's secret.
    """
    registration = await read_message(request, wire.EndpointRegistration, settings.max_body_bytes)
    registered = await endpoints.register(owner, registration)
    return reply(registered, reply_format, 201, {"Location": f"/v1/webhooks/endpoints/{registered.endpoint.id}"})


@router.get(
    "/endpoints",
    summary="List endpoints",
    responses=openapi.responses({200: wire.WebhookEndpointList}, (400, 401, 406, 503)),
)
async def all_endpoints(owner: Owner, reply_format: ReplyFormat, endpoints: WebhookEndpointsDep) -> Response:
    """List your endpoints, oldest first."""
    return reply(wire.WebhookEndpointList(endpoints=await endpoints.read_all(owner)), reply_format)


@router.get(
    "/endpoints/{id}",
    summary="Read an endpoint",
    responses=openapi.responses({200: wire.WebhookEndpoint}, (400, 401, 404, 406, 503)),
)
async def read(
    endpoint_id: EndpointId, owner: Owner, reply_format: ReplyFormat, endpoints: WebhookEndpointsDep
) -> Response:
    """Read an endpoint. `disabled_at` and `disabled_reason` are set if it receives no events."""
    return reply(await endpoints.read(owner, endpoint_id), reply_format)


@router.patch(
    "/endpoints/{id}",
    summary="Change an endpoint",
    responses=openapi.responses({200: wire.WebhookEndpoint}, BODY_ERRORS),
    openapi_extra=openapi.request_body(wire.EndpointChange),
)
async def change(
    endpoint_id: EndpointId,
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    settings: SettingsDep,
    endpoints: WebhookEndpointsDep,
) -> Response:
    """Change an endpoint. Pending deliveries go to the new URL. `disabled`: false enables one that answered 410."""
    message = await read_message(request, wire.EndpointChange, settings.max_body_bytes)
    return reply(await endpoints.change(owner, endpoint_id, message), reply_format)


@router.delete(
    "/endpoints/{id}",
    status_code=204,
    summary="Delete an endpoint",
    responses=openapi.responses({}, (400, 401, 404, 503)),
)
async def delete(endpoint_id: EndpointId, owner: Owner, endpoints: WebhookEndpointsDep) -> Response:
    """Delete an endpoint. Pending deliveries to it will fail."""
    await endpoints.delete(owner, endpoint_id)
    return Response(status_code=204)


@router.post(
    "/endpoints/{id}/secret",
    summary="Rotate an endpoint's secret",
    responses=openapi.responses({200: wire.WebhookSecret}, (400, 401, 404, 406, 503)),
)
async def rotate(
    endpoint_id: EndpointId, owner: Owner, reply_format: ReplyFormat, endpoints: WebhookEndpointsDep
) -> Response:
    """Replace the secret, which only this reply contains. Deliveries are signed with both secrets for a day."""
    return reply(await endpoints.rotate(owner, endpoint_id), reply_format)


@router.post(
    "/test",
    status_code=202,
    summary="Send a test event",
    responses=openapi.responses({202: wire.Delivery}, (*BODY_ERRORS, 409, 429)),
    openapi_extra=openapi.request_body(wire.TestEventRequest),
)
async def test(
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    settings: SettingsDep,
    endpoints: WebhookEndpointsDep,
    deliveries: WebhookDeliveriesDep,
) -> Response:
    """Send an event of the type `webhook.test`, which is delivered like any other. `Location` names the delivery."""
    message = await read_message(request, wire.TestEventRequest, settings.max_body_bytes)
    try:
        endpoint = await endpoints.read(owner, message.endpoint_id)
    except NotFound as error:
        raise NotFound(error.message, "endpoint_id") from None
    delivery = await deliveries.test(owner, endpoint)
    return reply(delivery, reply_format, 202, {"Location": f"/v1/webhooks/deliveries/{delivery.id}"})
