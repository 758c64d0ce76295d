"""/generate and /v1/score: SGLang's."""

from uuid import uuid4

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, known_query
from scorepool.api.dialects.sglang import score as labels
from scorepool.api.dialects.sglang.generate import Generated, GenerateRequest, to_answers, to_param, to_requests
from scorepool.api.dialects.sglang.score import ScoringRequest, ScoringResponse, to_response, to_scores
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.formats import reply
from scorepool.api.routes.completions import SYNCHRONOUS_ERRORS
from scorepool.api.routes.tokens import card_of
from scorepool.api.state import State
from scorepool.api.submission import answer, check_count, time_limit_s

router = APIRouter(tags=["sglang"], dependencies=[Depends(known_query)])


@router.post(
    "/generate",
    summary="Continue prompts",
    responses=openapi.answers({200: Generated | list[Generated]}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(GenerateRequest),
)
async def generate(request: Request, owner: Owner, parts: Parts) -> Response:
    """A list where several prompts came, or `n` is more than 1."""
    body = await read_message(request, GenerateRequest, parts.settings.max_body_bytes)
    check_count(parts.settings, len(body.prompts), "text" if body.input_ids is None else "input_ids", "prompts")
    card = await card_of(parts, body.model)
    requests = to_requests(body, card.id, time_limit_s(parts.settings))
    results = await answer(request, parts, owner, requests, to_param(body))
    answers = to_answers(body, results, uuid4().hex)
    return reply(answers if body.is_list else answers[0], "json")


@router.post(
    "/v1/score",
    summary="How likely tokens come next",
    responses=openapi.answers({200: ScoringResponse}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(ScoringRequest),
)
async def score(request: Request, owner: Owner, parts: Parts) -> Response:
    """The probability of each label after each item, or, with `apply_softmax`, among the labels."""
    body = await read_message(request, ScoringRequest, parts.settings.max_body_bytes)
    check_count(parts.settings, len(body.prompts), "items", "items")
    prompts = await _encoded(request, owner, parts, body)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadRequest(
                f"items[{index}]: expected a token to stand before the labels, found none", f"items[{index}]"
            )
    scores = to_scores(body, prompts, time_limit_s(parts.settings))
    results = await answer(request, parts, owner, scores, labels.to_param)
    return reply(to_response(body, prompts, results), "json")


async def _encoded(request: Request, owner: str, parts: State, body: ScoringRequest) -> list[list[int]]:
    """Text goes through the model's worker: the tokenizer is there."""
    if not isinstance(body.query, str):
        return [prompt for prompt in body.prompts if isinstance(prompt, list)]
    limit_s = time_limit_s(parts.settings)
    jobs = [wire.Tokenize(model=body.model, prompt=text, priority="high", timeout_s=limit_s) for text in body.prompts]
    return [result.sequences[0].token_ids for result in await answer(request, parts, owner, jobs)]
