"""/v1/completions: OpenAI's text completions, answered when they are done."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from api import openapi
from api.bodies import read_message
from api.dependencies import Owner, Parts, known_query
from api.entry import answer, time_limit_s
from api.errors import TooLarge
from api.formats import reply
from api.openai.completions import Completion, CompletionRequest, to_completion, to_requests

router = APIRouter(prefix="/v1/completions", tags=["openai"], dependencies=[Depends(known_query)])

SYNCHRONOUS_ERRORS = (400, 401, 404, 409, 413, 415, 429, 503)


@router.post(
    "",
    summary="Complete prompts",
    responses=openapi.answers({200: Completion}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(CompletionRequest),
)
async def complete(request: Request, owner: Owner, parts: Parts) -> Response:
    """A client that goes away cancels what it asked for."""
    body = await read_message(request, CompletionRequest, parts.settings.max_body_bytes)
    requests = to_requests(body, time_limit_s(parts.settings))
    if len(requests) > parts.settings.max_bulk_jobs:
        raise TooLarge(
            f"prompt: expected at most {parts.settings.max_bulk_jobs} prompts in one request, found {len(requests)}",
            "prompt",
        )
    results = await answer(request, parts, owner, requests)
    return reply(to_completion(body, results, f"cmpl-{uuid4().hex}"), "json")
