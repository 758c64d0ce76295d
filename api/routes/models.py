"""Serve /v1/models: the models that live workers serve. Clients of Anthropic's, by their header, get its form."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query
from msgspec.structs import replace
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import ModelsDep, Owner, ReplyFormat, beta, known_query
from scorepool.api.dialects import openai
from scorepool.api.dialects.anthropic.models import AnthropicModel, AnthropicModelPage, to_anthropic_model, to_page
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest, map_codes
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/models", tags=["models"], dependencies=[Depends(known_query), Depends(beta)])
AnthropicVersion = Annotated[
    str | None, Header(alias="anthropic-version", description="Any: the reply has Anthropic's form.")
]
PageId = Annotated[str | None, Query(max_length=256, description="Only with `anthropic-version`.")]


@router.get(
    "",
    summary="List the models that live workers serve",
    responses=openapi.responses({200: (wire.ModelList, AnthropicModelPage)}, (400, 401, 406, 503)),
)
async def list_models(
    _: Owner,
    reply_format: ReplyFormat,
    models: ModelsDep,
    anthropic_version: AnthropicVersion = None,
    before_id: PageId = None,
    after_id: PageId = None,
    limit: Annotated[int | None, Query(ge=1, le=1000, description="Only with `anthropic-version`.")] = None,
) -> Response:
    """List models: `data` has one entry per name, `models` one per worker, those that a crosscheck stopped included."""
    if before_id is not None and after_id is not None:
        raise BadRequest("before_id: expected `before_id` or `after_id`, found both", "before_id")
    live = await models.live()
    data = {name: to_model(name, served) for name, served in models.live_by_name().items()}
    if anthropic_version is not None:
        return reply(to_page(data, limit or len(data), before_id, after_id), reply_format)
    for name, value in (("before_id", before_id), ("after_id", after_id), ("limit", limit)):
        if value is not None:
            raise BadRequest(f"{name}: expected with the header anthropic-version only", name)
    without_tokenizer = [replace(model, tokenizer=None) for model in live]
    return reply(wire.ModelList(data=list(data.values()), models=without_tokenizer), reply_format)


@router.get(
    "/{id:path}",
    summary="Read one model",
    responses=openapi.responses({200: (wire.Model, AnthropicModel)}, (400, 401, 404, 406, 503)),
)
async def read_model(
    name: Annotated[str, Path(alias="id")],
    _: Owner,
    reply_format: ReplyFormat,
    models: ModelsDep,
    anthropic_version: AnthropicVersion = None,
) -> Response:
    """Read one model by its name or alias. 404: no live worker serves it. The error's code is OpenAI's."""
    await models.live()
    if served := models.live_by_name().get(name):
        model = to_model(name, served)
        return reply(model if anthropic_version is None else to_anthropic_model(model), reply_format)
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
