"""/v1/chat/completions: OpenAI's chats, answered when they are done."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from api import openapi
from api.bodies import read_message
from api.dependencies import Owner, Parts, known_query
from api.entry import answer, time_limit_s
from api.formats import reply
from api.openai.chat import ChatCompletion, ChatRequest, to_chat_completion, to_request
from api.routes.completions import SYNCHRONOUS_ERRORS

router = APIRouter(prefix="/v1/chat/completions", tags=["openai"], dependencies=[Depends(known_query)])


@router.post(
    "",
    summary="Answer a chat",
    responses=openapi.answers({200: ChatCompletion}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(ChatRequest),
)
async def chat(request: Request, owner: Owner, parts: Parts) -> Response:
    """A client that goes away cancels what it asked for."""
    body = await read_message(request, ChatRequest, parts.settings.max_body_bytes)
    [result] = await answer(request, parts, owner, [to_request(body, time_limit_s(parts.settings))])
    return reply(to_chat_completion(body, result, f"chatcmpl-{uuid4().hex}"), "json")
