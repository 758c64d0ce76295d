"""Serve `/tokenizer_info`, as vLLM has it: for a client that has no tokenizer."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import ModelsDep, Owner, ReplyFormat, known_query
from scorepool.api.http import openapi
from scorepool.api.http.formats import reply

router = APIRouter(tags=["tokens"], dependencies=[Depends(known_query)])


@router.get(
    "/tokenizer_info",
    summary="Special tokens and chat template",
    responses=openapi.responses({200: wire.TokenizerInfo}, (400, 401, 404, 406, 503)),
)
async def tokenizer_info(
    _: Owner, reply_format: ReplyFormat, models: ModelsDep, model: Annotated[str | None, Query(max_length=128)] = None
) -> Response:
    """Read what the model's worker registered. `model` may be left out if only one is served."""
    return reply((await models.find(model)).tokenizer, reply_format)
