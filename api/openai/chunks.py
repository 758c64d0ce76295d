"""Events of jobs to the chunks that OpenAI's clients read, for both generating routes."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import wire
from api.errors import Failed
from api.openai.growing import Diverged, Growing, Piece
from api.openai.sampling import SamplingRequest, Usage, usage_of

C = TypeVar("C")  # a dialect's chunk


class Chunked:
    """The choices of all jobs of one request, and what they add up to."""

    def __init__(self, body: SamplingRequest, ids: Sequence[str]) -> None:
        n = body.n or 1
        self.created = int(time.time())
        self._choices = {id_: [Growing(job * n + i) for i in range(n)] for job, id_ in enumerate(ids)}
        self._results: list[wire.Result] = []

    @property
    def usage(self) -> Usage:
        """Once all have ended."""
        return usage_of(self._results)

    def pieces(self, event: wire.Growth | wire.Job) -> list[Piece]:
        """Raises Failed if a job ran again and took another way than what was sent."""
        choices = self._choices[event.id]
        try:
            if isinstance(event, wire.Growth):
                piece = choices[event.sequence].grow(event)
                return [] if piece is None else [piece]
            assert event.result is not None
            self._results.append(event.result)
            return [choice.end(scored) for choice, scored in zip(choices, event.result.sequences, strict=True)]
        except Diverged:
            raise Failed("the worker died and the tokens that were sent could not be computed again") from None


async def chunks_of(
    events: AsyncGenerator[wire.Growth | wire.Job | None],
    chunked: Chunked,
    to_chunk: Callable[[Piece], C],
    to_last: Callable[[Usage], C] | None,
) -> AsyncGenerator[C | None]:
    """None passes: it keeps the connection open. `to_last` is for a client that asked for the usage."""
    try:
        async for event in events:
            if event is None:
                yield None
                continue
            for piece in chunked.pieces(event):
                yield to_chunk(piece)
        if to_last is not None:
            yield to_last(chunked.usage)
    finally:
        await events.aclose()
