"""/v1/chat/completions: OpenAI's chats, answered when they are done."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, known_query
from scorepool.api.dialects.openai.chat import (
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
from scorepool.api.dialects.openai.choice_stream import Delta
from scorepool.api.dialects.openai.chunks import Chunked, chunks_of
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.formats import reply
from scorepool.api.http.sse import DONE, EventStream, events_of
from scorepool.api.repositories.queue import job_ids
from scorepool.api.routes.completions import SYNCHRONOUS_ERRORS
from scorepool.api.state import State
from scorepool.api.submission import answer, time_limit_s

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

    def grown(piece: Delta) -> ChatChunk:
        return chunk([to_chunk(body, piece)], prompt_token_ids(body, piece))

    openings = [chunk([opening(index)]) for index in range(body.n or 1)]
    return EventStream(request, chunks_of(events, chunked, openings, grown, chunk([])), DONE)
