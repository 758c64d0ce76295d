"""Replies of `/v1/completions`: one choice per sequence of the results, whole or in chunks. Pure."""

import time
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import Delta, columns_from
from scorepool.api.dialects.detokenizer import (
    echoed_bytes,
    generated_text,
    logprobs_by_text,
    text_offsets,
    token_text,
    top_tokens,
)
from scorepool.api.dialects.openai.chunks import ChunkWriter
from scorepool.api.dialects.openai.completions import CompletionRequest
from scorepool.api.dialects.openai.sampling import Usage, system_fingerprint, usage_of_results


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


def to_completion(body: CompletionRequest, results: Sequence[wire.Result], reply_id: str) -> Completion:
    """Build the reply. The choices of a prompt are adjacent, in the order of the prompts."""
    choices: list[Choice] = []
    for prompt, result in zip(body.prompts, results, strict=True):
        best = _best(result, body.num_choices)
        choices += [_to_choice(body, prompt, sequence, len(choices) + i) for i, sequence in enumerate(best)]
    return Completion(
        id=reply_id,
        created=int(time.time()),
        model=body.model,
        choices=choices,
        usage=usage_of_results(results),
        system_fingerprint=system_fingerprint(results[0].stamp),
    )


class CompletionChunkWriter(ChunkWriter[CompletionChunk]):
    """Translate the events of the prompts' jobs into CompletionChunks.

    If the body echoes, the chunks of a prompt come first: events of its choices are held until its own job has ended.
    """

    def __init__(self, body: CompletionRequest, job_ids: Sequence[str], reply_id: str) -> None:
        num_prompts = len(body.prompts)
        super().__init__(body, job_ids[:num_prompts])
        self._body = body
        self._reply_id = reply_id
        self._job_ids = job_ids[:num_prompts]
        self._prompt_jobs = {job_id: number for number, job_id in enumerate(job_ids[num_prompts:])}
        self._held: dict[str, list[wire.TokenDelta | wire.Job]] = (
            {job_id: [] for job_id in self._job_ids} if body.echo else {}
        )
        self._echo_lengths: dict[int, int] = {}  # characters of the echoed prompt, by its number

    def add(self, event: wire.TokenDelta | wire.Job) -> list[object]:
        if event.id in self._prompt_jobs:
            return self._echo(self._prompt_jobs[event.id], event) if isinstance(event, wire.Job) else []
        if event.id in self._held and self._prompt_jobs:
            self._held[event.id].append(event)
            return []
        if event.id in self._held and isinstance(event, wire.Job):  # `max_tokens` is 0: the one job reports the prompt
            assert event.result is not None
            generated = [_generated(sequence) for sequence in event.result.sequences]
            self._held[event.id].append(replace(event, result=replace(event.result, sequences=generated)))
            return self._echo(self._job_ids.index(event.id), event)
        return super().add(event)

    def _echo(self, number: int, job: wire.Job) -> list[object]:
        """Return the chunks of a prompt, one per choice, and those of the events that were held."""
        assert job.result is not None
        body, sequence, prompt = self._body, job.result.sequences[0], self._body.prompts[number]
        self._count_prompt(replace(job, id=self._job_ids[number]))
        text, logprobs = _echoed(body, prompt, sequence)
        self._echo_lengths[number] = len(text)
        chunks: list[object] = [
            self._with_usage(
                self._chunk(
                    ChoiceChunk(
                        index=number * body.num_choices + i,
                        text=text,
                        logprobs=logprobs,
                        finish_reason=None,
                        token_ids=[] if body.return_token_ids else UNSET,
                    )
                )
            )
            for i in range(body.num_choices)
        ]
        for event in self._held.pop(self._job_ids[number]):
            chunks += super().add(event)
        return chunks

    def opening(self) -> list[CompletionChunk]:
        return []

    def to_chunk(self, delta: Delta) -> CompletionChunk:
        number = delta.index // self._body.num_choices
        return self._chunk(to_chunk(self._body, delta, self._echo_lengths.get(number, 0)))

    def usage_chunk(self) -> CompletionChunk:
        return self._chunk()

    def _chunk(self, *choices: ChoiceChunk) -> CompletionChunk:
        return CompletionChunk(id=self._reply_id, created=self.created, model=self._body.model, choices=list(choices))


def to_chunk(body: CompletionRequest, delta: Delta, echo_length: int = 0) -> ChoiceChunk:
    """Build the chunk of one delta. Its offsets begin after the `echo_length` characters of an echoed prompt."""
    logprobs = None
    if body.logprobs is not None:
        logprobs = _to_logprobs(body, delta.sequence, [echo_length + offset for offset in delta.text_offset])
    prompt_token_ids: list[int] | UnsetType = UNSET
    if body.return_token_ids and delta.finish_reason is not None:
        prompt_token_ids = _prompt_ids(body.prompts[delta.index // body.num_choices], delta.prompt_token_ids)
    return ChoiceChunk(
        index=delta.index,
        text=delta.text,
        logprobs=logprobs,
        finish_reason=delta.finish_reason,
        prompt_token_ids=prompt_token_ids,
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
    )


def _best(result: wire.Result, n: int) -> list[wire.SequenceResult]:
    """Return the n most likely of the `best_of` sequences, by logprob per token."""
    if len(result.sequences) == n:
        return result.sequences

    def mean_logprob(sequence: wire.SequenceResult) -> float:
        num_generated = len(sequence.token_ids) - sequence.num_reported_prompt_tokens
        return (sequence.logprob_sum or 0.0) / max(1, num_generated)

    return sorted(result.sequences, key=mean_logprob, reverse=True)[:n]


def _to_choice(body: CompletionRequest, prompt: str | list[int], sequence: wire.SequenceResult, index: int) -> Choice:
    split = sequence.num_reported_prompt_tokens
    text, logprobs = generated_text(sequence), None
    echo, echo_logprobs = _echoed(body, prompt, sequence) if body.echo else ("", None)
    if body.logprobs is not None:
        tokens = echoed_bytes(sequence, prompt if isinstance(prompt, str) else None)[split:]
        offsets = [len(echo) + offset for offset in text_offsets(tokens)]
        logprobs = _joined(echo_logprobs, _to_logprobs(body, columns_from(sequence, split), offsets))
    return Choice(
        index=index,
        text=echo + text,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason or "length",
        stop_reason=sequence.stop_reason,
        prompt_logprobs=UNSET if body.prompt_logprobs is None else _to_prompt_logprobs(sequence, body.prompt_logprobs),
        prompt_token_ids=_prompt_ids(prompt, sequence.prompt_token_ids) if body.return_token_ids else UNSET,
        token_ids=sequence.token_ids[split:] if body.return_token_ids else UNSET,
    )


def _echoed(
    body: CompletionRequest, prompt: str | list[int], sequence: wire.SequenceResult
) -> tuple[str, Logprobs | None]:
    """Return the text of a prompt, and its logprobs if they were asked for."""
    split = sequence.num_reported_prompt_tokens
    tokens = echoed_bytes(sequence, prompt if isinstance(prompt, str) else None)[:split]
    text = b"".join(tokens).decode(errors="replace")
    if body.logprobs is None:
        return text, None
    return text, _to_logprobs(body, columns_from(sequence, 0, split), text_offsets(tokens))


def _generated(sequence: wire.SequenceResult) -> wire.SequenceResult:
    """Return a sequence without the tokens of its prompt."""
    return replace(
        columns_from(sequence, sequence.num_reported_prompt_tokens),
        text=generated_text(sequence),
        skipped=sequence.skipped,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        prompt_token_ids=sequence.prompt_token_ids,
    )


def _prompt_ids(prompt: str | list[int], encoded: list[int] | None) -> list[int]:
    return prompt if isinstance(prompt, list) else encoded or []


def _joined(first: Logprobs | None, second: Logprobs) -> Logprobs:
    if first is None:
        return second
    return Logprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _to_logprobs(body: CompletionRequest, sequence: wire.SequenceResult, offsets: list[int]) -> Logprobs:
    as_ids = bool(body.return_tokens_as_token_ids)
    assert sequence.logprobs is not None
    logprobs = sequence.logprobs.values()
    tokens = list(zip(sequence.token_ids, sequence.token_bytes, strict=True))
    by_text: list[dict[str, float] | None] = []
    for entry, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if logprob is None:
            by_text.append(None)
            continue
        top = top_tokens(sequence, entry)[: body.logprobs or 0]
        by_text.append(logprobs_by_text([*top, (*token, logprob)], as_ids))
    return Logprobs(
        tokens=[token_text(*token, as_ids) for token in tokens],
        token_logprobs=logprobs,
        top_logprobs=by_text,
        text_offset=offsets,
    )


def _to_prompt_logprobs(sequence: wire.SequenceResult, k: int) -> list[dict[str, PromptLogprob] | None]:
    """Return the actual token and the k most likely ones of each entry, by token id; null for the first token."""
    assert sequence.logprobs is not None
    assert sequence.ranks is not None
    logprobs = sequence.logprobs.values()
    found: list[dict[str, PromptLogprob] | None] = []
    for entry in range(sequence.num_reported_prompt_tokens):
        logprob, rank = logprobs[entry], sequence.ranks[entry]
        if logprob is None or rank is None:
            found.append(None)
            continue
        ranked = [(*token, number) for number, token in enumerate(top_tokens(sequence, entry)[:k], start=1)]
        ranked.append((sequence.token_ids[entry], sequence.token_bytes[entry], logprob, rank))
        found.append(
            {
                str(token_id): PromptLogprob(
                    logprob=value, rank=number, decoded_token=token_text(token_id, token_bytes)
                )
                for token_id, token_bytes, value, number in ranked
                if value is not None
            }
        )
    return found
