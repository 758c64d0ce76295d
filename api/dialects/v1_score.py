"""Serve `/v1/score`, which SGLang and vLLM have with different bodies: only SGLang's name `label_token_ids`. Pure."""

from typing import Any, ClassVar

from msgspec import UNSET, Raw, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.either import EitherEndpoint
from scorepool.api.dialects.protocol import Dialect, Endpoint
from scorepool.api.dialects.sglang.score import SCORE, ScoringRequest, ScoringResponse
from scorepool.api.dialects.vllm.score import SCORE_PAIRS, PairScoreRequest, PairScoreResponse


class _Mark(Struct):
    label_token_ids: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET


class V1ScoreEndpoint(EitherEndpoint):
    name = "score"
    path = "/v1/score"
    summary = "Probabilities of next tokens, or scores of pairs"
    description = (
        "SGLang's, with `label_token_ids`: the probability of each label after each item, or, with `apply_softmax`, "
        "among the labels. vLLM's, with two lists of texts: see `/score`."
    )
    example: ClassVar = {"model": "demo", "query": [1], "items": [[2], [3]], "label_token_ids": [4, 5]}
    reply_type = (ScoringResponse, PairScoreResponse)
    has_large_replies = True

    @property
    def body_types(self) -> tuple[type, ...]:
        return ScoringRequest, PairScoreRequest

    def endpoint_for(self, body: bytes, message_format: wire.Format) -> Endpoint[Any]:
        try:
            mark = wire.parse(body, _Mark, message_format)
        except wire.Invalid:  # the endpoint says what is wrong
            return SCORE
        is_pairs = mark.label_token_ids is UNSET and not mark.text_1 is mark.queries is mark.data_1 is UNSET
        return SCORE_PAIRS if is_pairs else SCORE

    def endpoint_of(self, body: object) -> Endpoint[Any]:
        return SCORE_PAIRS if isinstance(body, PairScoreRequest) else SCORE


V1_SCORE = V1ScoreEndpoint()
DIALECT = Dialect(tag="sglang", endpoints=(V1_SCORE,))
