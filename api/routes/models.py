"""/v1/models: what live workers serve."""

from collections.abc import Iterable

from fastapi import APIRouter, Depends
from msgspec.structs import replace
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, ReplyFormat, known_query
from scorepool.api.http import openapi
from scorepool.api.http.formats import reply

router = APIRouter(prefix="/v1/models", tags=["models"], dependencies=[Depends(known_query)])


@router.get(
    "",
    summary="List what live workers serve",
    responses=openapi.answers({200: wire.ModelList}, (400, 401, 406, 503)),
)
async def models(_: Owner, form: ReplyFormat, parts: Parts) -> Response:
    """One card per worker: several workers of one model are told apart by `worker`."""
    cards = await parts.models.cards()
    bare = [replace(card, tokenizer=None) for card in cards]
    return reply(wire.ModelList(data=by_name(cards), models=bare), form)


@router.get(
    "/{id:path}",
    summary="Read one model",
    responses=openapi.answers({200: wire.Model}, (400, 401, 404, 406, 503)),
)
async def model(id: str, _: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """404 when no live worker serves it."""
    for one in by_name(await parts.models.cards()):
        if one.id == id:
            return reply(one, form)
    raise parts.models.unserved(id)


def by_name(cards: Iterable[wire.ServedModel]) -> list[wire.Model]:
    """Each name and alias once; its oldest worker's age, its widest worker's context."""
    models: dict[str, list[wire.ServedModel]] = {}
    for card in cards:
        models.setdefault(card.id, []).append(card)
    for card in cards:
        for alias in card.aliases:
            if alias not in models or models[alias][0].id == card.id != alias:
                models.setdefault(alias, []).append(card)
    return [
        wire.Model(
            id=name,
            root=cards[0].id,
            created=min(card.created for card in cards),
            max_model_len=max(card.context_length for card in cards),
        )
        for name, cards in models.items()
    ]
