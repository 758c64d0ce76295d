"""/v1/chat/completions: OpenAI's chats, answered when they are done."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

import wire
from api import openapi
from api.bodies import read_message
from api.dependencies import Owner, Parts, known_query
from api.entry import answer, time_limit_s
from api.formats import reply
from api.openai.chat import (
    ChatChoiceChunk,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    opening,
    prompt_token_ids,
    to_chat_completion,
    to_chunk,
    to_param,
    to_request,
)
from api.openai.chunks import Chunked, chunks_of
from api.openai.growing import Piece
from api.queue import job_ids
from api.routes.completions import SYNCHRONOUS_ERRORS
from api.state import State
from api.stream import DONE, EventStream, events_of

router = APIRouter(prefix="/v1/chat/completions", tags=["openai"], dependencies=[Depends(known_query)])


@router.post(
    "",
    summary="Answer a chat",
    responses=openapi.answers({200: ChatCompletion}, SYNCHRONOUS_ERRORS, events=openapi.chunks(ChatChunk)),
    openapi_extra=openapi.body(ChatRequest),
)
async def chat(request: Request, owner: Owner, parts: Parts) -> Response:
    """A client that goes away cancels what it asked for. With `stream`: ChatChunks as server-sent events."""
    body = await read_message(request, ChatRequest, parts.settings.max_body_bytes)
    message = to_request(body, time_limit_s(parts.settings))
    unique = f"chatcmpl-{uuid4().hex}"
    if body.stream:
        return await stream(request, owner, parts, body, message, unique)
    [result] = await answer(request, parts, owner, [message], to_param)
    return reply(to_chat_completion(body, result, unique), "json")


async def stream(
    request: Request, owner: str, parts: State, body: ChatRequest, message: wire.Generate, unique: str
) -> Response:
    ids = job_ids(owner, None, None)
    events = events_of(parts, owner, [message], ids, to_param)
    await anext(events)  # what is refused is refused before the answer begins
    chunked = Chunked(body, ids)

    def chunk(choices: list[ChatChoiceChunk], given_ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(
            id=unique, created=chunked.created, model=body.model, choices=choices, prompt_token_ids=given_ids
        )

    def grown(piece: Piece) -> ChatChunk:
        return chunk([to_chunk(body, piece)], prompt_token_ids(body, piece))

    openings = [chunk([opening(index)]) for index in range(body.n or 1)]
    return EventStream(request, chunks_of(events, chunked, openings, grown, chunk([])), DONE)
