"""/v1/models: what live workers serve."""

from fastapi import APIRouter, Depends
from starlette.responses import Response

import wire
from api import openapi
from api.dependencies import Owner, Parts, ReplyFormat, known_query
from api.formats import reply

router = APIRouter(prefix="/v1/models", tags=["models"], dependencies=[Depends(known_query)])


@router.get(
    "",
    summary="List what live workers serve",
    responses=openapi.answers({200: wire.ModelList}, (400, 401, 406, 503)),
)
async def models(_: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """One card per worker: several workers of one model are told apart by `worker`."""
    return reply(wire.ModelList(models=await parts.models.cards()), form)
