"""/v1/models: the models that live workers serve."""

from collections.abc import Iterable
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
    responses=openapi.answers({200: wire.ModelList}, (400, 401, 406, 503)),
)
async def list_models(_: Owner, form: ReplyFormat, models: ModelsDep) -> Response:
    """`data` has one entry a name; `models` has one a worker: several workers of one model differ in `worker`."""
    live = await models.live()
    without_tokenizer = [replace(model, tokenizer=None) for model in live]
    return reply(wire.ModelList(data=by_name(live), models=without_tokenizer), form)


@router.get(
    "/{id:path}",
    summary="Read one model",
    responses=openapi.answers({200: wire.Model}, (400, 401, 404, 406, 503)),
)
async def read_model(
    name: Annotated[str, Path(alias="id")], _: Owner, form: ReplyFormat, models: ModelsDep
) -> Response:
    """Read one model by its name or alias. 404: no live worker serves it. The error's code is OpenAI's."""
    for model in by_name(await models.live()):
        if model.id == name:
            return reply(model, form)
    with map_codes(openai.DIALECT.error_codes):
        raise models.not_served(name)


def by_name(live: Iterable[wire.ServedModel]) -> list[wire.Model]:
    """List each name and alias once, with the age of its oldest worker and the longest context of its workers."""
    workers: dict[str, list[wire.ServedModel]] = {}
    for served in live:
        workers.setdefault(served.id, []).append(served)
    for served in live:
        for alias in served.aliases:
            if alias not in workers or workers[alias][0].id == served.id != alias:
                workers.setdefault(alias, []).append(served)
    return [
        wire.Model(
            id=name,
            root=group[0].id,
            created=min(served.created for served in group),
            max_model_len=max(served.context_length for served in group),
        )
        for name, group in workers.items()
    ]
