"""/v1/completions: OpenAI's text completions, answered when they are done."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, known_query
from scorepool.api.dialects.openai.chunks import Chunked, chunks_of
from scorepool.api.dialects.openai.completions import (
    ChoiceChunk,
    Completion,
    CompletionChunk,
    CompletionRequest,
    to_chunk,
    to_completion,
    to_param,
    to_requests,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.formats import reply
from scorepool.api.http.sse import DONE, EventStream, events_of
from scorepool.api.repositories.queue import job_ids
from scorepool.api.state import State
from scorepool.api.submission import answer, check_count, time_limit_s

router = APIRouter(prefix="/v1/completions", tags=["openai"], dependencies=[Depends(known_query)])

SYNCHRONOUS_ERRORS = (400, 401, 404, 409, 413, 415, 429, 503)


@router.post(
    "",
    summary="Complete prompts",
    responses=openapi.answers({200: Completion}, SYNCHRONOUS_ERRORS, events=openapi.chunks(CompletionChunk)),
    openapi_extra=openapi.body(CompletionRequest),
)
async def complete(request: Request, owner: Owner, parts: Parts) -> Response:
    """A client that goes away cancels what it asked for. With `stream`: CompletionChunks as server-sent events."""
    body = await read_message(request, CompletionRequest, parts.settings.max_body_bytes)
    requests = to_requests(body, time_limit_s(parts.settings))
    check_count(parts.settings, len(requests), "prompt", "prompts")
    unique = f"cmpl-{uuid4().hex}"
    if body.stream:
        return await stream(request, owner, parts, body, requests, unique)
    results = await answer(request, parts, owner, requests, to_param)
    return reply(to_completion(body, results, unique), "json")


async def stream(
    request: Request, owner: str, parts: State, body: CompletionRequest, requests: list[wire.Generate], unique: str
) -> Response:
    ids = job_ids(owner, None, len(requests))
    events = events_of(parts, owner, requests, ids, to_param)
    await anext(events)  # what is refused is refused before the answer begins
    chunked = Chunked(body, ids)

    def chunk(choices: list[ChoiceChunk]) -> CompletionChunk:
        return CompletionChunk(id=unique, created=chunked.created, model=body.model, choices=choices)

    chunks = chunks_of(events, chunked, (), lambda piece: chunk([to_chunk(body, piece)]), chunk([]))
    return EventStream(request, chunks, DONE)
