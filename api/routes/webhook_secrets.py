"""Serve /v1/webhooks/secret."""

from fastapi import APIRouter, Depends
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, ReplyFormat, WebhookSecretsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], dependencies=[Depends(known_query)])
RESPONSES = openapi.responses({200: wire.JobWebhookSecret}, (400, 401, 406, 409, 503))


@router.get("/secret", summary="Read the secret of jobs' webhooks", responses=RESPONSES)
async def read(owner: Owner, reply_format: ReplyFormat, secrets: WebhookSecretsDep) -> Response:
    """Read the secret that signs the events that your jobs send to the URL in their field `webhook`.

    409: the server has no webhooks, or no keys; then its operator's secret signs them.
    """
    return reply(await secrets.read(owner), reply_format)


@router.post("/secret", summary="Rotate the secret of jobs' webhooks", responses=RESPONSES)
async def rotate(owner: Owner, reply_format: ReplyFormat, secrets: WebhookSecretsDep) -> Response:
    """Replace the secret. Deliveries are signed with both secrets for a day."""
    return reply(await secrets.rotate(owner), reply_format)
