"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: what a client without a tokenizer needs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, ReplyFormat, known_query
from scorepool.api.dialects.openai.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    to_text,
    to_tokens,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.formats import reply
from scorepool.api.routes.completions import SYNCHRONOUS_ERRORS
from scorepool.api.state import State
from scorepool.api.submission import answer, time_limit_s

router = APIRouter(tags=["tokens"], dependencies=[Depends(known_query)])


@router.post(
    "/tokenize",
    summary="Text or a chat to token ids",
    responses=openapi.answers({200: TokenizeReply}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(TokenizeRequest),
)
async def tokenize(request: Request, owner: Owner, parts: Parts) -> Response:
    """A job of the model's worker, ahead of others: the tokenizer is there."""
    body = await read_message(request, TokenizeRequest, parts.settings.max_body_bytes)
    card = await card_of(parts, body.model)
    job = wire.Tokenize(
        model=card.id,
        prompt=body.prompt,
        messages=None if body.messages is None else [message.to_wire() for message in body.messages],
        add_bos=body.add_special_tokens is not False,
        priority="high",
        timeout_s=time_limit_s(parts.settings),
    )
    [result] = await answer(request, parts, owner, [job])
    return reply(to_tokens(result, card.context_length, bool(body.return_token_strs)), "json")


@router.post(
    "/detokenize",
    summary="Token ids to text",
    responses=openapi.answers({200: DetokenizeReply}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(DetokenizeRequest),
)
async def detokenize(request: Request, owner: Owner, parts: Parts) -> Response:
    """What is not UTF-8 becomes U+FFFD."""
    body = await read_message(request, DetokenizeRequest, parts.settings.max_body_bytes)
    card = await card_of(parts, body.model)
    limit_s = time_limit_s(parts.settings)
    job = wire.Tokenize(model=card.id, prompt=body.tokens, priority="high", timeout_s=limit_s)
    [result] = await answer(request, parts, owner, [job])
    return reply(to_text(result), "json")


@router.get(
    "/tokenizer_info",
    summary="Special tokens and chat template",
    responses=openapi.answers({200: wire.TokenizerInfo}, (400, 401, 404, 406, 503)),
)
async def tokenizer_info(
    _: Owner, form: ReplyFormat, parts: Parts, model: Annotated[str | None, Query(max_length=128)] = None
) -> Response:
    """As the worker's card says. `model` may be left out where one alone is served."""
    return reply((await card_of(parts, model)).tokenizer, form)


async def card_of(parts: State, model: str | None) -> wire.ServedModel:
    """Of the model, or of the only one that is served. Raises ModelNotServed, BadRequest."""
    if model is None:
        await parts.models.cards()
        names = parts.models.names
        if len(names) > 1:
            raise BadRequest(f"model: several are served, so say which of {', '.join(names)}", "model")
        model = names[0] if names else ""
    cards = (await parts.models.serving([model]))[model]
    if not cards:
        raise parts.models.unserved(model)
    return cards[0]
