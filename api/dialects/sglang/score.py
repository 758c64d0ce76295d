"""SGLang's `/v1/score`: how likely each of some tokens comes next, after each of some texts. Pure."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.openai.sampling import Usage
from scorepool.wire.request import ModelName, Text, TokenId


class ScoringRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Texts are joined as they are, and encoded then; token ids are joined."""

    model: ModelName
    query: Text | Annotated[list[TokenId], Meta(max_length=1_000_000)]
    items: Text | Annotated[list[Text | Annotated[list[TokenId], Meta(max_length=1_000_000)]], Meta(min_length=1)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)]
    apply_softmax: Annotated[bool, Meta(description="Over the labels, so that they add up to 1.")] = False
    item_first: bool = False

    def __post_init__(self) -> None:
        kinds = {type(part) for part in (self.query, *self.parts)}
        if len(kinds) > 1:
            raise ValueError("`query` and `items` must both be text or both be token ids")

    @property
    def parts(self) -> list[str | list[int]]:
        return [self.items] if isinstance(self.items, str) else list(self.items)

    @property
    def prompts(self) -> list[str | list[int]]:
        pairs = [(part, self.query) if self.item_first else (self.query, part) for part in self.parts]
        return [first + second for first, second in pairs]  # type: ignore[operator]


class ScoringResponse(Struct, frozen=True, kw_only=True):
    """`scores`: of each item, in the order of the labels."""

    object: Literal["scoring"] = "scoring"
    model: str
    scores: list[list[float]]
    usage: Usage


def to_param(field: str) -> str:
    """A field of one of the wire.Scores in the words of the ScoringRequest."""
    place = re.match(r"(?:\[(?P<item>\d+)\]\.)?items\[(?P<label>\d+)\](?P<of_label>\.completion)?", field)
    if place is None:
        return field
    return f"label_token_ids[{place['label']}]" if place["of_label"] else f"items[{place['item'] or 0}]"


def to_scores(body: ScoringRequest, prompts: Sequence[list[int]], timeout_s: int) -> list[wire.Score]:
    """One an item: its prompt is computed once, and each label is scored after it."""
    return [
        wire.Score(
            model=body.model,
            timeout_s=timeout_s,
            items=[wire.ScoreItem(prompt=prompt, completion=[label]) for label in body.label_token_ids],
        )
        for prompt in prompts
    ]


def to_response(body: ScoringRequest, prompts: Sequence[list[int]], results: Sequence[wire.Result]) -> ScoringResponse:
    logprobs = [[_logprob(scored) for scored in result.sequences] for result in results]
    num_tokens = sum(map(len, prompts))
    return ScoringResponse(
        model=body.model,
        scores=[_softmax(row) if body.apply_softmax else [math.exp(one) for one in row] for row in logprobs],
        usage=Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens),
    )


def _logprob(scored: wire.SequenceResult) -> float:
    """Of the label, the one token that was scored."""
    assert scored.logprobs is not None
    *_, logprob = scored.logprobs
    return float(logprob)


def _softmax(logprobs: Sequence[float]) -> list[float]:
    largest = max(logprobs)
    weights = [math.exp(one - largest) for one in logprobs]
    return [weight / math.fsum(weights) for weight in weights]
