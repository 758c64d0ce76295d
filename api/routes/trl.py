"""/get_sequence_logprobs/: TRL's, for trainers that distil from a teacher."""

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import Owner, Parts, known_query
from scorepool.api.dialects.trl.sequence_logprobs import (
    SequenceLogprobs,
    SequenceLogprobsRequest,
    check,
    to_arrays,
    to_lists,
    to_scores,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import TooLarge
from scorepool.api.http.formats import reply
from scorepool.api.routes.completions import SYNCHRONOUS_ERRORS
from scorepool.api.routes.tokens import card_of
from scorepool.api.submission import answer, check_count, time_limit_s

router = APIRouter(tags=["trl"], dependencies=[Depends(known_query)])

MAX_ENTRIES = 2**24  # of the padded arrays of one reply: 128 MiB of logprobs and ids


@router.post(
    "/get_sequence_logprobs/",
    summary="Logprobs of given sequences",
    responses=openapi.answers({200: SequenceLogprobs}, SYNCHRONOUS_ERRORS),
    openapi_extra=openapi.body(SequenceLogprobsRequest),
)
async def get_sequence_logprobs(request: Request, owner: Owner, parts: Parts) -> Response:
    """Each sequence is a job, so the workers of the model share them. `temperature` divides the logits."""
    body = await read_message(request, SequenceLogprobsRequest, parts.settings.max_body_bytes)
    card = await card_of(parts, body.model)
    check(body, card)
    num, longest, k = body.shape
    check_count(parts.settings, num, "sequences", "sequences")
    if body.response_format == "binary" and num * longest * max(k, 1) > MAX_ENTRIES:
        raise TooLarge(
            f"sequences: {num} of up to {longest} tokens with {k} likeliest each are {num * longest * k} entries; "
            f"expected at most {MAX_ENTRIES} in one reply",
            "sequences",
        )
    scores = to_scores(body, card.id, time_limit_s(parts.settings))
    results = await answer(request, parts, owner, scores) if scores else []
    to_reply = to_arrays if body.response_format == "binary" else to_lists
    return reply(await run_in_threadpool(to_reply, body, results), "json")  # it may take a second
