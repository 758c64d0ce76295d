"""`/v1/completions`: one wire.Generate a prompt, and one choice a sequence of their results.

With vLLM's additions: `prompt_logprobs`, `return_token_ids`, `return_tokens_as_token_ids`, `add_special_tokens`,
`skip_special_tokens`, and those of sampling.py.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.fields import in_words
from scorepool.api.dialects.openai.choice_stream import Delta
from scorepool.api.dialects.openai.detokenizer import generated_text, likeliest, offsets, pieces_of_text, token_text
from scorepool.api.dialects.openai.sampling import SamplingRequest, Usage, sampled, system_fingerprint, usage_of
from scorepool.wire.request import Text, TokenId, TokenIds

to_param = in_words({"prompt": "prompt"}, listed="prompt")


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=131_072)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="True where it is null: special tokens that are generated are not in `text`.")]
        | None
    ) = None
    suffix: Annotated[None, Meta(description="Not supported.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list) and len({type(part) for part in self.prompt}) > 1:
            raise ValueError("`prompt` is a string, a list of strings, a list of token ids, or a list of such lists")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("`best_of` must be at least `n`")
        if (self.min_tokens or 0) > self.num_most_tokens:
            raise ValueError(f"`min_tokens` must be at most `max_tokens`, {self.num_most_tokens}")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("`max_tokens` 0 generates nothing: it needs `echo`: true or `prompt_logprobs`")
        if self.stream and (self.echo or self.prompt_logprobs is not None or (self.best_of or 1) > (self.n or 1)):
            raise ValueError("`echo`, `prompt_logprobs` and a `best_of` above `n` cannot be streamed")

    @property
    def num_most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class Logprobs(Struct, frozen=True, kw_only=True):
    """Arrays in step, one entry a token of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]  # the token itself is among them
    text_offset: list[int]  # in characters of `text`


class ChoiceChunk(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | UnsetType = UNSET  # beside the finish_reason
    stop_reason: int | str | UnsetType | None = UNSET  # of the last
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class Choice(Struct, frozen=True, kw_only=True):
    """The last three are there when they were asked for."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # which of `stop_token_ids` or `stop` it was
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str


class CompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[ChoiceChunk]
    # With `include_usage`: null but in the last, which has no choices; with `continuous_usage_stats` as it is so far.
    usage: Usage | UnsetType | None = UNSET


def to_requests(body: CompletionRequest, timeout_s: int) -> list[wire.Generate]:
    """One a prompt, so that the workers of a model share them."""
    tops = max(body.logprobs or 0, body.prompt_logprobs or 0)
    num_rows = max(body.n or 1, body.best_of or 1)
    wants_logprobs = body.logprobs is not None or body.prompt_logprobs is not None or num_rows > (body.n or 1)
    return [
        wire.Generate(
            **sampled(body, timeout_s),
            prompt=prompt,
            max_tokens=body.num_most_tokens,
            n=num_rows,
            add_bos=body.add_special_tokens is not False,
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_logprobs=bool(body.echo) or body.prompt_logprobs is not None,
            logprobs=wants_logprobs,
            top_logprobs=tops,
            rank=body.prompt_logprobs is not None,
        )
        for prompt in body.prompts
    ]


def to_completion(body: CompletionRequest, results: Sequence[wire.Result], id: str) -> Completion:  # noqa: A002
    """Choices of a prompt stand together, in the order of the prompts."""
    n = body.n or 1
    choices: list[Choice] = []
    for prompt, result in zip(body.prompts, results, strict=True):
        choices += [_to_choice(body, prompt, scored, len(choices) + i) for i, scored in enumerate(_best(result, n))]
    return Completion(
        id=id,
        created=int(time.time()),
        model=body.model,
        choices=choices,
        usage=usage_of(results),
        system_fingerprint=system_fingerprint(results[0].stamp),
    )


def _best(result: wire.Result, n: int) -> list[wire.SequenceResult]:
    """Of `best_of` sequences the n likeliest, by logprob per token."""
    if len(result.sequences) == n:
        return result.sequences

    def mean(scored: wire.SequenceResult) -> float:
        return (scored.logprob_sum or 0.0) / max(1, len(scored.token_ids) - scored.num_reported_prompt_tokens)

    return sorted(result.sequences, key=mean, reverse=True)[:n]


def _to_choice(body: CompletionRequest, prompt: str | list[int], scored: wire.SequenceResult, index: int) -> Choice:
    split = scored.num_reported_prompt_tokens
    pieces = pieces_of_text(scored, prompt if isinstance(prompt, str) else None)
    text = generated_text(scored)
    if body.echo:
        text = b"".join(pieces[:split]).decode(errors="replace") + text
    return Choice(
        index=index,
        text=text,
        logprobs=None if body.logprobs is None else _to_logprobs(body, scored, pieces),
        finish_reason=scored.finish_reason or "length",
        stop_reason=scored.stop_reason,
        prompt_logprobs=UNSET if body.prompt_logprobs is None else _to_prompt_logprobs(scored, body.prompt_logprobs),
        prompt_token_ids=_given_ids(prompt, scored.prompt_token_ids) if body.return_token_ids else UNSET,
        token_ids=scored.token_ids[split:] if body.return_token_ids else UNSET,
    )


def _given_ids(prompt: str | list[int], encoded: list[int] | None) -> list[int]:
    return prompt if isinstance(prompt, list) else encoded or []


def to_chunk(body: CompletionRequest, piece: Delta) -> ChoiceChunk:
    logprobs = None
    if body.logprobs is not None:
        logprobs = replace(_to_logprobs(body, piece.scored, piece.contents), text_offset=piece.text_offset)
    given_ids: list[int] | UnsetType = UNSET
    if body.return_token_ids and piece.finish_reason is not None:
        given_ids = _given_ids(body.prompts[piece.index // (body.n or 1)], piece.prompt_token_ids)
    return ChoiceChunk(
        index=piece.index,
        text=piece.text,
        logprobs=logprobs,
        finish_reason=piece.finish_reason,
        prompt_token_ids=given_ids,
        stop_reason=piece.stop_reason if piece.finish_reason else UNSET,
        token_ids=piece.scored.token_ids if body.return_token_ids else UNSET,
    )


def _to_logprobs(body: CompletionRequest, scored: wire.SequenceResult, pieces: list[bytes]) -> Logprobs:
    first = 0 if body.echo else scored.num_reported_prompt_tokens
    as_ids = bool(body.return_tokens_as_token_ids)
    assert scored.logprobs is not None
    logprobs = scored.logprobs.values()[first:]
    tops: list[dict[str, float] | None] = []
    for entry, logprob in enumerate(logprobs, start=first):
        if logprob is None:
            tops.append(None)
            continue
        tokens, values = _top(scored, entry, body.logprobs or 0)
        chosen = (scored.token_ids[entry], scored.token_bytes[entry])
        tops.append(likeliest([*tokens, chosen], [*values, logprob], as_ids))
    return Logprobs(
        tokens=[
            token_text(token_id, piece, as_ids)
            for token_id, piece in zip(scored.token_ids[first:], scored.token_bytes[first:], strict=True)
        ],
        token_logprobs=logprobs,
        top_logprobs=tops,
        text_offset=offsets(pieces[first:]),
    )


def _top(scored: wire.SequenceResult, entry: int, k: int) -> tuple[list[tuple[int, bytes]], list[float | None]]:
    """The k likeliest tokens at an entry, and their logprobs."""
    if k == 0 or scored.top_ids is None or scored.top_bytes is None or scored.top_logprobs is None:
        return [], []
    tokens = list(zip(scored.top_ids[entry], scored.top_bytes[entry], strict=True))
    return tokens[:k], scored.top_logprobs[entry].values()[:k]


def _to_prompt_logprobs(scored: wire.SequenceResult, k: int) -> list[dict[str, PromptLogprob] | None]:
    """By token id, null for the first token: the token that stands there, and the k likeliest."""
    assert scored.logprobs is not None
    assert scored.ranks is not None
    logprobs = scored.logprobs.values()
    found: list[dict[str, PromptLogprob] | None] = []
    for entry in range(scored.num_reported_prompt_tokens):
        logprob, rank = logprobs[entry], scored.ranks[entry]
        if logprob is None or rank is None:
            found.append(None)
            continue
        tokens, values = _top(scored, entry, k)
        ranked = [
            (token_id, piece, value, place)
            for place, ((token_id, piece), value) in enumerate(zip(tokens, values, strict=True), start=1)
        ]
        ranked.append((scored.token_ids[entry], scored.token_bytes[entry], logprob, rank))
        found.append(
            {
                str(token_id): PromptLogprob(logprob=value, rank=place, decoded_token=token_text(token_id, piece))
                for token_id, piece, value, place in ranked
                if value is not None
            }
        )
    return found
