"""Serve /v1/models: the models that live workers serve."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from msgspec.structs import replace
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import ModelsDep, Owner, ReplyFormat, known_query
from scorepool.api.dialects import openai
from scorepool.api.http import openapi
from scorepool.api.http.errors import map_codes
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/models", tags=["models"], dependencies=[Depends(known_query)])


@router.get(
    "",
    summary="List the models that live workers serve",
    responses=openapi.responses({200: wire.ModelList}, (400, 401, 406, 503)),
)
async def list_models(_: Owner, reply_format: ReplyFormat, models: ModelsDep) -> Response:
    """List models: `data` has one entry per name, `models` one per worker, those that a crosscheck stopped included."""
    without_tokenizer = [replace(model, tokenizer=None) for model in await models.live()]
    data = [to_model(name, served) for name, served in models.live_by_name().items()]
    return reply(wire.ModelList(data=data, models=without_tokenizer), reply_format)


@router.get(
    "/{id:path}",
    summary="Read one model",
    responses=openapi.responses({200: wire.Model}, (400, 401, 404, 406, 503)),
)
async def read_model(
    name: Annotated[str, Path(alias="id")], _: Owner, reply_format: ReplyFormat, models: ModelsDep
) -> Response:
    """Read one model by its name or alias. 404: no live worker serves it. The error's code is OpenAI's."""
    await models.live()
    if served := models.live_by_name().get(name):
        return reply(to_model(name, served), reply_format)
    with map_codes(openai.DIALECT.error_codes):
        raise models.not_served(name)


def to_model(name: str, served: Sequence[wire.ServedModel]) -> wire.Model:
    """Build the model of a name from its workers' entries: the oldest worker's age, the longest context."""
    return wire.Model(
        id=name,
        root=served[0].id,
        parent=None if name in (served[0].id, *served[0].aliases) else served[0].id,
        created=min(entry.created for entry in served),
        max_model_len=max(entry.context_length for entry in served),
    )
