"""Events of jobs to the chunks that OpenAI's clients read, for both generating routes."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.openai.chat import ChatChunk
from scorepool.api.dialects.openai.choice_stream import ChoiceStream, Delta, Diverged
from scorepool.api.dialects.openai.completions import CompletionChunk
from scorepool.api.dialects.openai.sampling import SamplingRequest, StreamOptions, Usage, used
from scorepool.api.http.errors import Failed

C = TypeVar("C", ChatChunk, CompletionChunk)


class Chunked:
    """The choices of all jobs of one request, and what they add up to."""

    def __init__(self, body: SamplingRequest, ids: Sequence[str]) -> None:
        n = body.n or 1
        self.created = int(time.time())
        self._options = body.stream_options or StreamOptions()
        self._choices = {id_: [ChoiceStream(job * n + i) for i in range(n)] for job, id_ in enumerate(ids)}
        self._prompt_tokens: dict[str, int | None] = {}  # of the jobs that began; None: the worker does not say

    @property
    def usage(self) -> Usage | None:
        """So far: of the prompts that were begun, and the tokens that were sent."""
        counts = [count for count in self._prompt_tokens.values() if count is not None]
        if len(counts) < len(self._prompt_tokens):
            return None
        return used(sum(counts), sum(choice.num_sent for choices in self._choices.values() for choice in choices))

    def hear(self, event: wire.TokenDelta | wire.Job) -> None:
        if isinstance(event, wire.Job):
            assert event.result is not None
            self._prompt_tokens[event.id] = event.result.usage.prompt_tokens
        elif event.first == 0:
            self._prompt_tokens[event.id] = event.num_prompt_tokens
        else:
            self._prompt_tokens.setdefault(event.id, None)

    def pieces(self, event: wire.TokenDelta | wire.Job) -> list[Delta]:
        """Raises Failed if a job ran again and took another way than what was sent."""
        choices = self._choices[event.id]
        try:
            if isinstance(event, wire.TokenDelta):
                piece = choices[event.sequence].grow(event)
                return [] if piece is None else [piece]
            assert event.result is not None
            return [choice.end(scored) for choice, scored in zip(choices, event.result.sequences, strict=True)]
        except Diverged:
            raise Failed("the worker died and the tokens that were sent could not be computed again") from None

    def told(self, chunk: C) -> C:
        """With the usage as the client asked for it: not at all, null until the end, or so far."""
        if not self._options.wants_usage:
            return chunk
        return replace(chunk, usage=self.usage if self._options.continuous_usage_stats else None)

    def last(self, chunk: C) -> C | None:
        return replace(chunk, usage=self.usage) if self._options.wants_usage else None


async def chunks_of(
    events: AsyncGenerator[wire.TokenDelta | wire.Job | None],
    chunked: Chunked,
    openings: Sequence[C],
    to_chunk: Callable[[Delta], C],
    last: C,
) -> AsyncGenerator[C | None]:
    """None passes: it keeps the connection open. `openings` come with the first token, as from vLLM, for nothing is
    known of a prompt that text became before; `last` is for a client that asked for the usage."""
    try:
        async for event in events:
            if event is None:
                yield None
                continue
            chunked.hear(event)
            for opening in openings:
                yield chunked.told(opening)
            openings = ()
            for piece in chunked.pieces(event):
                yield chunked.told(to_chunk(piece))
        if (end := chunked.last(last)) is not None:
            yield end
    finally:
        await events.aclose()
