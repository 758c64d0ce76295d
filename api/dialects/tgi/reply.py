"""Build the replies and the events of text-generation-inference's routes. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta, without_prompt
from scorepool.api.dialects.detokenizer import (
    IncrementalDetokenizer,
    emitted_bytes,
    generated_text,
    token_text,
    top_tokens,
)
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.api.dialects.tgi.generate import TextGenerationRequest

FinishReason = Literal["length", "eos_token", "stop_sequence"]
SeedOfSampling = Annotated[
    int | None, Meta(description="The `seed` of the request; null if there is none, or no sampling.")
]


class PrefillToken(Struct, frozen=True, kw_only=True):
    """Report a token of the prompt."""

    id: int
    text: str
    logprob: Annotated[float | None, Meta(description="null for the first token, which has none.")]


class TextGenerationToken(Struct, frozen=True, kw_only=True):
    """Report a generated token, or one that was likely in its place."""

    id: int
    text: str
    logprob: float | None
    special: Annotated[bool, Meta(description="true: a special token, which is not in `generated_text`.")]


TopTokens = Annotated[
    list[list[TextGenerationToken]] | UnsetType, Meta(description="Present with `top_n_tokens`: a list for each token.")
]


class TextGenerationDetails(Struct, frozen=True, kw_only=True):
    """Report on a generated text."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: SeedOfSampling
    prefill: Annotated[list[PrefillToken], Meta(description="Empty without `decoder_input_details`.")]
    tokens: list[TextGenerationToken]
    top_tokens: TopTokens = UNSET


class TextGeneration(Struct, frozen=True, kw_only=True):
    """Give the generated text. A stop string that ended it is part of it."""

    generated_text: str
    details: Annotated[TextGenerationDetails | UnsetType, Meta(description="Present with `details`.")] = UNSET


class TextGenerationStreamDetails(Struct, frozen=True, kw_only=True):
    """Report on a generated text at the end of its stream."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: SeedOfSampling
    input_length: Annotated[int, Meta(description="Tokens of the prompt.")]


class TextGenerationEvent(Struct, frozen=True, kw_only=True):
    """Give one generated token. The last one also has the whole text."""

    index: Annotated[int, Meta(description="Number of the token, from 1.")]
    token: TextGenerationToken
    top_tokens: Annotated[list[TextGenerationToken] | UnsetType, Meta(description="Present with `top_n_tokens`.")] = (
        UNSET
    )
    generated_text: str | None = None
    details: TextGenerationStreamDetails | None = None


def to_reply(body: TextGenerationRequest, result: wire.Result) -> TextGeneration:
    """Build the reply from the result of its job."""
    [sequence] = result.sequences
    text = _whole_text(body, sequence)
    if not body.params.details:
        return TextGeneration(generated_text=text)
    split = sequence.num_reported_prompt_tokens
    emitted_tokens = emitted_bytes(sequence)
    tokens = list(zip(sequence.token_ids, sequence.token_bytes, emitted_tokens, _logprobs(sequence), strict=True))
    details = TextGenerationDetails(
        finish_reason=_finish_reason(sequence),
        generated_tokens=len(tokens) - split,
        seed=_seed(body),
        prefill=[
            PrefillToken(id=token_id, text=token_text(token_id, given), logprob=logprob)
            for token_id, given, _, logprob in tokens[:split]
        ],
        tokens=[
            _token(token_id, given, token_text(token_id, given), logprob, is_special=bool(given and not emitted))
            for token_id, given, emitted, logprob in tokens[split:]
        ],
        top_tokens=[_top(sequence, place) for place in range(split, len(tokens))]
        if body.params.top_n_tokens
        else UNSET,
    )
    return TextGeneration(generated_text=text, details=details)


class TokenEventWriter:
    """Translate the events of the job to one event per token. The last token is held back until the job has ended."""

    def __init__(self, body: TextGenerationRequest) -> None:
        self._body = body
        self._choice = ChoiceStream(0)
        self._text = IncrementalDetokenizer()
        self._num_tokens = 0
        self._held: TextGenerationEvent | None = None

    def add(self, event: StreamEvent) -> Sequence[object]:
        """Return the events that follow. Raise Diverged if the job ran again and generated other tokens."""
        if isinstance(event, wire.TokenDelta):
            delta = self._choice.add(event)
            return [] if delta is None else self._events(delta)
        assert event.result is not None
        [sequence] = event.result.sequences
        events = self._events(self._choice.end(without_prompt(sequence)))
        if self._held is None:
            return events
        details = TextGenerationStreamDetails(
            finish_reason=_finish_reason(sequence),
            generated_tokens=self._num_tokens,
            seed=_seed(self._body),
            input_length=event.result.usage.prompt_tokens,
        )
        last = replace(self._held, generated_text=_whole_text(self._body, sequence), details=details)
        return [*events, replace(last, token=replace(last.token, text=last.token.text + self._text.end()))]

    def end(self) -> Sequence[object]:
        """Return nothing: the last token ends the stream."""
        return []

    def _events(self, delta: Delta) -> list[object]:
        """Return the events of all tokens so far but the last one."""
        sequence, events = delta.sequence, []
        for place, (token_id, given, content, logprob) in enumerate(
            zip(sequence.token_ids, sequence.token_bytes, delta.contents, _logprobs(sequence), strict=True)
        ):
            is_special = bool(given and not content)
            text = token_text(token_id, given) if is_special else self._text.add([content])[0]
            self._num_tokens += 1
            if self._held is not None:
                events.append(self._held)
            self._held = TextGenerationEvent(
                index=self._num_tokens,
                token=_token(token_id, given, text, logprob, is_special=is_special),
                top_tokens=_top(sequence, place) if self._body.params.top_n_tokens else UNSET,
            )
        return list(events)


def _whole_text(body: TextGenerationRequest, sequence: wire.SequenceResult) -> str:
    return (body.inputs if body.params.return_full_text else "") + generated_text(sequence)


def _finish_reason(sequence: wire.SequenceResult) -> FinishReason:
    if sequence.finish_reason != "stop":
        return "length"
    return "stop_sequence" if isinstance(sequence.stop_reason, str) else "eos_token"


def _logprobs(sequence: wire.SequenceResult) -> list[float | None]:
    return [None] * len(sequence.token_ids) if sequence.logprobs is None else sequence.logprobs.values()


def _seed(body: TextGenerationRequest) -> int | None:
    return body.params.seed if body.params.samples else None


def _top(sequence: wire.SequenceResult, place: int) -> list[TextGenerationToken]:
    return [
        _token(token_id, given, token_text(token_id, given), logprob, is_special=False)
        for token_id, given, logprob in top_tokens(sequence, place)
    ]


def _token(token_id: int, given: bytes, text: str, logprob: float | None, *, is_special: bool) -> TextGenerationToken:
    return TextGenerationToken(id=token_id, text=text, logprob=logprob, special=is_special)
