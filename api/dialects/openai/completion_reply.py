"""Build the replies of `/v1/completions`: one choice per sequence of the results, whole or in chunks. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import Delta, columns_from, without_prompt
from scorepool.api.dialects.detokenizer import (
    echoed_bytes,
    generated_text,
    logprobs_by_text,
    text_offsets,
    token_text,
)
from scorepool.api.dialects.openai.chunks import ChunkWriter
from scorepool.api.dialects.openai.completions import CompletionRequest
from scorepool.api.dialects.openai.prompt_logprobs import PromptLogprobs, to_prompt_logprobs
from scorepool.api.dialects.openai.sampling import (
    ChunkUsage,
    CompletionUsage,
    DraftLogprobsIfAsked,
    LastDraftLogprobs,
    LastFingerprint,
    LastModeIfLogprobs,
    LastPromptTokenIds,
    LastStopReason,
    ModeIfLogprobs,
    StopReason,
    TokenIdsIfAsked,
    fingerprint_of_results,
    reported_tokens,
    usage_of_results,
)
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.api.dialects.top_cap import MaxTopLogprobsIfClamped
from scorepool.api.dialects.weights import LastWeightsVersion, WeightsVersion, weights_version


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Report the tokens of a choice's text. Every list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: Annotated[list[dict[str, float] | None], Meta(description="Always with the token itself.")]
    text_offset: Annotated[list[int], Meta(description="Position of each token in the choice's text, in characters.")]


class CompletionChoiceChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[
        Literal["stop", "length"] | None, Meta(description="null until the last chunk of the choice.")
    ]
    prompt_token_ids: LastPromptTokenIds = UNSET
    stop_reason: LastStopReason = UNSET
    token_ids: TokenIdsIfAsked = UNSET
    draft_logprobs: LastDraftLogprobs = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """Give one completion of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIdsIfAsked = UNSET
    token_ids: TokenIdsIfAsked = UNSET
    draft_logprobs: DraftLogprobsIfAsked = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Answer with completions. The choices of a prompt are adjacent, in the order of the prompts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: str
    logprobs_mode: ModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: WeightsVersion = UNSET


class CompletionChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of the completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoiceChunk]
    usage: ChunkUsage = UNSET
    system_fingerprint: LastFingerprint = UNSET
    logprobs_mode: LastModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: LastWeightsVersion = UNSET


def to_completion(body: CompletionRequest, results: Sequence[wire.Result], reply_id: str, created: int) -> Completion:
    """Build the reply from the results of the prompts' jobs, in the order of the prompts. `created` is in unix s."""
    choices: list[CompletionChoice] = []
    for prompt, result in zip(body.prompts, results, strict=True):
        best = _best(result, body.num_choices)
        choices += [_to_choice(body, prompt, sequence, len(choices) + i) for i, sequence in enumerate(best)]
    return Completion(
        id=reply_id,
        created=created,
        model=body.model,
        choices=choices,
        usage=usage_of_results(results),
        system_fingerprint=fingerprint_of_results(results),
        logprobs_mode=results[0].logprobs_mode if body.has_logprobs else UNSET,
        weights_version=weights_version(results, body.if_weights),
    )


class CompletionChunkWriter(ChunkWriter[CompletionChunk]):
    """Translate the events of the prompts' jobs to CompletionChunks.

    If the body echoes, events of a prompt's choices are held until the job that reports the prompt has ended, because
    the prompt comes first.
    """

    def __init__(self, body: CompletionRequest, job_ids: Sequence[str], reply_id: str, created: int) -> None:
        num_prompts = len(body.prompts)
        super().__init__(body, job_ids[:num_prompts], created)
        self._body = body
        self._reply_id = reply_id
        self._job_ids = job_ids[:num_prompts]
        self._prompt_jobs = {job_id: number for number, job_id in enumerate(job_ids[num_prompts:])}
        self._held: dict[str, list[StreamEvent]] = {job_id: [] for job_id in self._job_ids} if body.echo else {}
        self._echo_lengths: dict[int, int] = {}  # characters of the echoed prompt, by its number

    def add(self, event: StreamEvent) -> list[object]:
        if event.id in self._prompt_jobs:
            return self._echo(self._prompt_jobs[event.id], event) if isinstance(event, wire.Job) else []
        if event.id in self._held and self._prompt_jobs:
            self._held[event.id].append(event)
            return []
        if event.id in self._held and isinstance(event, wire.Job):  # `max_tokens` is 0: the one job reports the prompt
            assert event.result is not None
            generated = [without_prompt(sequence) for sequence in event.result.sequences]
            self._held[event.id].append(replace(event, result=replace(event.result, sequences=generated)))
            return self._echo(self._job_ids.index(event.id), event)
        return super().add(event)

    def _echo(self, number: int, job: wire.Job) -> list[object]:
        """Return the chunks of a prompt, one per choice, and those of the events that were held."""
        assert job.result is not None
        body, sequence, prompt = self._body, job.result.sequences[0], self._body.prompts[number]
        self._count_prompt(replace(job, id=self._job_ids[number]))
        text, logprobs = _echoed_prompt(body, prompt, sequence)
        self._echo_lengths[number] = len(text)
        chunks: list[object] = [
            self._with_usage(
                self._chunk(
                    CompletionChoiceChunk(
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

    def _chunk(self, *choices: CompletionChoiceChunk) -> CompletionChunk:
        return CompletionChunk(id=self._reply_id, created=self.created, model=self._body.model, choices=list(choices))


def to_chunk(body: CompletionRequest, delta: Delta, echo_length: int = 0) -> CompletionChoiceChunk:
    """Build the chunk of one delta. Its offsets begin after the `echo_length` characters of an echoed prompt."""
    logprobs = None
    if body.logprobs is not None:
        offsets = [echo_length + offset for offset in delta.text_offset]
        logprobs = _to_logprobs(body, delta.sequence, offsets, body.logprob_token_ids)
    prompt_token_ids: list[int] | UnsetType = UNSET
    if body.return_token_ids and delta.finish_reason is not None:
        prompt_token_ids = _prompt_ids(body.prompts[delta.index // body.num_choices], delta.prompt_token_ids)
    return CompletionChoiceChunk(
        index=delta.index,
        text=delta.text,
        logprobs=logprobs,
        finish_reason=delta.finish_reason,
        prompt_token_ids=prompt_token_ids,
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
        draft_logprobs=UNSET if delta.draft_logprobs is None else delta.draft_logprobs,
    )


def _best(result: wire.Result, n: int) -> list[wire.SequenceResult]:
    """Return the n most likely of the `best_of` sequences, by logprob per token."""
    if len(result.sequences) == n:
        return result.sequences

    def mean_logprob(sequence: wire.SequenceResult) -> float:
        num_generated = len(sequence.token_ids) - sequence.num_reported_prompt_tokens
        return (sequence.logprob_sum or 0.0) / max(1, num_generated)

    return sorted(result.sequences, key=mean_logprob, reverse=True)[:n]


def _to_choice(
    body: CompletionRequest, prompt: str | list[int], sequence: wire.SequenceResult, index: int
) -> CompletionChoice:
    split = sequence.num_reported_prompt_tokens
    text, logprobs = generated_text(sequence), None
    echo, echo_logprobs = _echoed_prompt(body, prompt, sequence) if body.echo else ("", None)
    if body.logprobs is not None:
        tokens = echoed_bytes(sequence, _whole_text(prompt, sequence))[split:]
        offsets = [len(echo) + offset for offset in text_offsets(tokens)]
        generated = _to_logprobs(body, columns_from(sequence, split), offsets, body.logprob_token_ids)
        logprobs = _join_logprobs(echo_logprobs, generated)
    return CompletionChoice(
        index=index,
        text=echo + text,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason or "length",
        stop_reason=sequence.stop_reason,
        prompt_logprobs=UNSET if body.prompt_logprobs is None else to_prompt_logprobs(sequence, body.prompt_logprobs),
        prompt_token_ids=_prompt_ids(prompt, sequence.prompt_token_ids) if body.return_token_ids else UNSET,
        token_ids=sequence.token_ids[split:] if body.return_token_ids else UNSET,
        draft_logprobs=UNSET if sequence.draft_logprobs is None else sequence.draft_logprobs,
    )


def _echoed_prompt(
    body: CompletionRequest, prompt: str | list[int], sequence: wire.SequenceResult
) -> tuple[str, CompletionLogprobs | None]:
    """Return the text of a prompt, and its logprobs if they were asked for."""
    split = sequence.num_reported_prompt_tokens
    tokens = echoed_bytes(sequence, _whole_text(prompt, sequence))[:split]
    text = b"".join(tokens).decode(errors="replace")
    if body.logprobs is None:
        return text, None
    return text, _to_logprobs(body, columns_from(sequence, 0, split), text_offsets(tokens), target_ids=None)


def _whole_text(prompt: str | list[int], sequence: wire.SequenceResult) -> str | None:
    """Return the prompt if it is a text that was not cut."""
    return prompt if isinstance(prompt, str) and not sequence.truncated else None


def _prompt_ids(prompt: str | list[int], encoded: list[int] | None) -> list[int]:
    """Return the ids of a prompt, which the worker reports if the prompt was text or may be cut."""
    return prompt if isinstance(prompt, list) and encoded is None else encoded or []


def _join_logprobs(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _to_logprobs(
    body: CompletionRequest,
    sequence: wire.SequenceResult,
    offsets: list[int],
    target_ids: list[int] | None,
) -> CompletionLogprobs:
    """Report tokens, each beside the targets, or the most likely ones if there are no targets."""
    as_ids = bool(body.return_tokens_as_token_ids)
    assert sequence.logprobs is not None
    logprobs = sequence.logprobs.values()
    tokens = list(zip(sequence.token_ids, sequence.token_bytes, strict=True))
    by_text: list[dict[str, float] | None] = []
    for entry, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if logprob is None:
            by_text.append(None)
            continue
        beside = reported_tokens(sequence, entry, target_ids, body.logprobs or 0)
        by_text.append(logprobs_by_text([*beside, (*token, logprob)], as_ids))
    return CompletionLogprobs(
        tokens=[token_text(*token, as_ids) for token in tokens],
        token_logprobs=logprobs,
        top_logprobs=by_text,
        text_offset=offsets,
    )
