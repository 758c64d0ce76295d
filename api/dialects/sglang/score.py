"""Translate SGLang's `/v1/score`: the probability of each label token after each text. Pure."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.sampling import CompletionUsage, to_usage
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.api.dialects.sglang import foreign_fields
from scorepool.wire.request_fields import MAX_LIST_LENGTH, AnyTokenIds, ModelName, Text, TokenId


class ScoringRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score label tokens after a query and each item. Texts are joined unchanged and then encoded; ids are joined."""

    model: ModelName
    query: Text | AnyTokenIds
    items: Text | Annotated[list[Text | AnyTokenIds], Meta(min_length=1, max_length=MAX_LIST_LENGTH)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)]
    apply_softmax: Annotated[bool, Meta(description="Normalise over the labels, so that they add up to 1.")] = False
    item_first: Annotated[bool, Meta(description="Put each item before the query.")] = False

    def __post_init__(self) -> None:
        if len({type(text) for text in (self.query, *self.item_list)}) > 1:
            raise ValueError("`query` and `items` must both be text or both be token ids")

    @property
    def item_list(self) -> list[str | list[int]]:
        """Return the items, each as text or as token ids."""
        return [self.items] if isinstance(self.items, str) else list(self.items)

    def prompts(self) -> Iterator[str | list[int]]:
        """Yield what comes before the labels, for each item: a text or token ids, which repeat the query."""
        for item in self.item_list:
            first, second = (item, self.query) if self.item_first else (self.query, item)
            yield first + second  # type: ignore[operator]


class ScoringResponse(Struct, frozen=True, kw_only=True):
    """Report the probabilities of the labels."""

    object: Literal["scoring"] = "scoring"
    model: str
    scores: Annotated[list[list[float]], Meta(description="One list per item, in the order of the labels.")]
    usage: CompletionUsage


_encoding_field_name = map_field({"prompt": "items"}, list_field="prompt")


def field_name(field: str) -> str:
    """Map a field of the wire.Scores, or of the wire.Tokenizes before them, to a field of the body."""
    in_prompt = re.match(r"(?:\[(?P<item>\d+)\]\.)?prompt\[", field)
    if in_prompt:
        return f"items[{in_prompt['item'] or 0}]"
    match = re.match(r"(?:\[(?P<item>\d+)\]\.)?items\[(?P<label>\d+)\](?P<completion>\.completion)?", field)
    if match is None:
        return _encoding_field_name(field)
    return f"label_token_ids[{match['label']}]" if match["completion"] else f"items[{match['item'] or 0}]"


def to_scores(body: ScoringRequest, prompts: Iterable[list[int]], timeout_s: int) -> Iterator[wire.Score]:
    """Build one request per item: its prompt is computed once, and each label is scored after it.

    Raise wire.Invalid if a prompt has no token.
    """
    items = [wire.ScoreItem(completion=[label]) for label in body.label_token_ids]
    for index, prompt in enumerate(prompts):
        if not prompt:
            field = f"items[{index}]"
            raise wire.Invalid(f"{field}: expected a token before the labels, found none", field)
        yield wire.Score(model=body.model, timeout_s=timeout_s, prompt=prompt, items=items)


def to_response(body: ScoringRequest, num_prompt_tokens: int, results: Sequence[wire.Result]) -> ScoringResponse:
    """Build the reply from the results of the items, in the order of the items."""
    logprobs = [[_label_logprob(sequence) for sequence in result.sequences] for result in results]
    return ScoringResponse(
        model=body.model,
        scores=[_softmax(of_item) if body.apply_softmax else list(map(math.exp, of_item)) for of_item in logprobs],
        usage=to_usage(num_prompt_tokens, 0),
    )


def _label_logprob(sequence: wire.SequenceResult) -> float:
    """Return the logprob of the label, which is the last token."""
    assert sequence.logprobs is not None
    *_, logprob = sequence.logprobs
    return float(logprob)


def _softmax(logprobs: Sequence[float]) -> list[float]:
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    return [weight / math.fsum(weights) for weight in weights]


class ScoreEndpoint(Endpoint[ScoringRequest]):
    """Take the bodies of `/v1/score` that are SGLang's: see api/dialects/v1_score.py."""

    name = "score_labels"
    path = "/v1/score"
    summary = "Probabilities of next tokens"
    description = "The probability of each label after each item, or, with `apply_softmax`, among the labels."
    body_type = ScoringRequest
    reply_type = ScoringResponse
    foreign_fields = foreign_fields.SCORE
    has_large_replies = True

    def job_count(self, body: ScoringRequest) -> JobCount:
        return JobCount(len(body.item_list), "items", "items")

    def texts_to_encode(self, body: ScoringRequest, served_model: wire.ServedModel) -> Iterable[str]:
        return (prompt for prompt in body.prompts() if isinstance(prompt, str))

    def to_requests(self, body: ScoringRequest, context: Context) -> Iterable[wire.Request]:
        given = (prompt for prompt in body.prompts() if isinstance(prompt, list))
        return to_scores(body, context.encoded_texts or given, context.timeout_s)

    def to_reply(self, body: ScoringRequest, results: Sequence[wire.Result], context: Context) -> ScoringResponse:
        num_given = sum(len(body.query) + len(item) for item in body.item_list)
        return to_response(body, sum(map(len, context.encoded_texts)) or num_given, results)

    def field_name(self, body: ScoringRequest, field: str) -> str:
        return field_name(field)


SCORE = ScoreEndpoint()
