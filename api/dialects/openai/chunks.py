"""Translate the events of jobs to the chunks that OpenAI's clients read, for chat and completions. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta
from scorepool.api.dialects.openai.sampling import CompletionUsage, StreamOptions, system_fingerprint, to_usage
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.api.dialects.weights import weights_version

DONE = b"data: [DONE]\n\n"  # the last event of every stream
Chunk = TypeVar("Chunk", bound=Struct)


class StreamedBody(Protocol):
    """Say what a stream needs to know of its request."""

    @property
    def num_choices(self) -> int: ...
    @property
    def has_logprobs(self) -> bool: ...
    @property
    def stream_options(self) -> StreamOptions | None: ...
    @property
    def if_weights(self) -> int | None: ...


class ChunkWriter(ABC, Generic[Chunk]):
    """Track the choices of all jobs of one request, and their usage so far."""

    max_top_logprobs: int | UnsetType = UNSET  # shown in the last chunk of a choice: what K was clamped to, if it was

    def __init__(self, body: StreamedBody, job_ids: Sequence[str], created: int) -> None:
        n = body.num_choices
        self.created = created  # unix, s
        self._options = body.stream_options or StreamOptions()
        self._has_logprobs = body.has_logprobs
        self._if_weights = body.if_weights
        self._choices = {job_id: [ChoiceStream(job * n + i) for i in range(n)] for job, job_id in enumerate(job_ids)}
        self._num_prompt_tokens: dict[str, int | None] = {}  # by id of a job that began; None: not known yet
        self._ended: dict[str, wire.Usage] = {}  # by id of a job that ended
        self._is_open = False

    @abstractmethod
    def opening(self) -> list[Chunk]:
        """Return the chunks before the first token."""

    @abstractmethod
    def to_chunk(self, delta: Delta) -> Chunk:
        """Return the chunk of a choice's delta."""

    @abstractmethod
    def usage_chunk(self) -> Chunk:
        """Return the chunk without choices that carries the usage."""

    @property
    def usage(self) -> CompletionUsage | None:
        """Return the usage so far, of the jobs that began: None until the length of each prompt is known."""
        counts = [count for count in self._num_prompt_tokens.values() if count is not None]
        if len(counts) < len(self._num_prompt_tokens):
            return None
        sent = [choice for choices in self._choices.values() for choice in choices]
        num_sent, num_reasoning = sum(each.num_sent for each in sent), sum(each.num_reasoning for each in sent)
        return to_usage(sum(counts), num_sent, self._ended.values(), num_reasoning)

    def add(self, event: StreamEvent) -> list[object]:
        """Return the chunks of an event. Raise Diverged if a job ran again and generated other tokens.

        The opening comes with the first tokens, as vLLM sends it: until then the prompt's length is not known.
        """
        self._count_prompt(event)
        chunks = [] if self._is_open else [self._with_usage(chunk) for chunk in self.opening()]
        self._is_open = True
        for delta in self._deltas(event):
            chunk = self.to_chunk(delta)
            if delta.finish_reason is not None and isinstance(event, wire.Job) and event.result is not None:
                chunk = replace(chunk, **self._facts_of(event.result))
            chunks.append(self._with_usage(chunk))
        return chunks

    def _facts_of(self, result: wire.Result) -> dict[str, Any]:
        """Return the fields that the last chunk of a choice has."""
        facts: dict[str, Any] = {
            "system_fingerprint": system_fingerprint(result.stamp),
            "weights_version": weights_version([result], self._if_weights),
        }
        if self._has_logprobs:
            facts |= {"logprobs_mode": result.logprobs_mode, "max_top_logprobs": self.max_top_logprobs}
        return facts

    def end(self) -> list[object]:
        """Return the usage, if it is asked for, and the end of the stream."""
        chunk: list[Any] = [replace(self.usage_chunk(), usage=self.usage)] if self._options.wants_usage else []
        return [*chunk, DONE]

    def _count_prompt(self, event: StreamEvent) -> None:
        if isinstance(event, wire.Job):
            assert event.result is not None
            self._num_prompt_tokens[event.id] = event.result.usage.prompt_tokens
            self._ended[event.id] = event.result.usage
        elif event.first == 0:
            self._num_prompt_tokens[event.id] = event.num_prompt_tokens
        else:
            self._num_prompt_tokens.setdefault(event.id, None)

    def _deltas(self, event: StreamEvent) -> Iterator[Delta]:
        """Yield what comes next of each choice. No delta has two of reasoning, content and calls, as at OpenAI."""
        choices = self._choices[event.id]
        if isinstance(event, wire.TokenDelta):
            yield from choices[event.sequence].add_runs(event)
            return
        assert event.result is not None
        for choice, sequence in zip(choices, event.result.sequences, strict=True):
            yield from choice.end_runs(sequence)

    def _with_usage(self, chunk: Chunk) -> object:
        """Add the usage as the client asked for it: none, null until the end, or the usage so far."""
        if not self._options.wants_usage:
            return chunk
        return replace(chunk, usage=self.usage if self._options.continuous_usage_stats else None)
