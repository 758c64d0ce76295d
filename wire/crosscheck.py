"""Define the messages between workers of one model that compute the same score job. They hold token ids, no text."""

from typing import Annotated

from msgspec import Meta, Struct

from scorepool.wire.columns import Floats
from scorepool.wire.comparison import Comparison, ScoredSequence, compare, tolerance_nats
from scorepool.wire.provenance import Provenance
from scorepool.wire.request_fields import TokenId


class Computation(Struct, frozen=True, kw_only=True):
    """Hold the logprobs that one worker computed: one column per sequence."""

    worker: str
    stamp: Provenance
    logprobs: list[Floats]


class Crosscheck(Struct, tag="crosscheck", frozen=True, kw_only=True):
    """Ask the worker that receives it to compute a score job that has ended.

    With one computation a second worker confirms it. With two, which differ, a third worker decides. With three the
    worker of the first, which differs from the two others, computes the job again.
    """

    job_id: str
    temperature: Annotated[float, Meta(gt=0)]
    token_ids: list[list[TokenId]]  # by sequence, prompts included
    first: list[int]  # by sequence: the position of the first token that has a logprob entry
    computations: list[Computation]
    prefix_scope: str | None = None  # KV caches of prefixes are shared with sequences of the same scope only

    def __post_init__(self) -> None:
        lengths = [len(ids) - first for ids, first in zip(self.token_ids, self.first, strict=True)]
        if min(lengths, default=0) < 1 or min(self.first) < 0 or not 1 <= len(self.computations) <= 3:
            raise ValueError("a crosscheck has sequences, positions in them, and one to three computations")
        for one in self.computations:
            if [len(logprobs) for logprobs in one.logprobs] != lengths:
                raise ValueError("a crosscheck has one logprob entry for each token")

    def compare(self, one: Computation, other: Computation) -> Comparison:
        """Compare two computations of the job by the tolerance of their stamps."""
        tolerance = tolerance_nats(one.stamp, other.stamp, self.temperature)
        return compare(self._scored(one), self._scored(other), tolerance)

    def _scored(self, computation: Computation) -> list[ScoredSequence]:
        columns = zip(self.token_ids, self.first, computation.logprobs, strict=True)
        return [ScoredSequence(token_ids=ids, first=first, logprobs=logprobs) for ids, first, logprobs in columns]


class CrosscheckNotice(Struct, tag="notice", frozen=True, kw_only=True):
    """Ask the worker that receives it to show a difference that no majority explains."""

    difference: str


CrosscheckMessage = Crosscheck | CrosscheckNotice
