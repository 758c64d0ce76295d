"""Compare two sequences token by token: the same text under two models, or two texts.

Tokens are paired by their place, counted from the first token of the completion, because one of the results may report
the prompt and the other not. Logprobs are subtracted where both have the same token.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import JobsDep
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.page.jobs import JobId, JobViewerDep
from scorepool.api.page.rendering import PageRoute, html
from scorepool.api.page.tokens import MAX_INLINE_TOKENS, MAX_SHOWN, ShownToken, TokenReader, finite_exp, legend_of
from scorepool.api.page.viewer import ViewerResultsDep
from scorepool.api.repositories.jobs import Jobs

router = APIRouter(route_class=PageRoute, include_in_schema=False)
NUM_LARGEST = 20
_ENDS = [0.01, 0.05, 0.2, 1.0, 3.0]  # nats: the end of each step on either side of 0
MIDDLE = len(_ENDS)  # the step of equal logprobs


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of both sequences at one place."""

    place: int  # from the first token of the completion; those of the prompt are negative
    first: ShownToken | None
    second: ShownToken | None
    difference: float | None  # second - first, in nats; None unless both have the same token with a logprob

    @property
    def step(self) -> int | None:
        """The step on the scale of differences: MIDDLE is none, less is likelier under the first."""
        return None if self.difference is None else step_of(self.difference)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sequences side by side. The sums are over the places that have a difference."""

    pairs: list[Pair]  # of one page
    start: int
    num_places: int
    num_compared: int
    first_unlike: int | None  # the place where their tokens differ for the first time
    mean: float | None
    mean_absolute: float | None
    sums: tuple[float | None, float | None]
    perplexities: tuple[float | None, float | None]
    largest: list[Pair]  # of all places
    legend: list[str]


def compare_sequences(first: wire.SequenceResult, second: wire.SequenceResult, start: int) -> Comparison:
    """Pair the tokens of two sequences, and show MAX_SHOWN places from the `start`th on."""
    readers = TokenReader(first, "logprob"), TokenReader(second, "logprob")
    offsets = first.num_reported_prompt_tokens, second.num_reported_prompt_tokens
    lengths = len(first.token_ids), len(second.token_ids)
    low = -max(offsets)
    num_places = max(length - offset for length, offset in zip(lengths, offsets, strict=True)) - low
    start = min(start, max(0, num_places - 1) // MAX_SHOWN * MAX_SHOWN)
    # Places that both sequences have.
    common = range(-min(offsets), min(lengths[0] - offsets[0], lengths[1] - offsets[1]))
    alike = [place for place in common if _key(first, place + offsets[0]) == _key(second, place + offsets[1])]
    differences: dict[int, float] = {}
    sums = [0.0, 0.0]
    for place in alike:
        logprobs = [reader.logprobs[place + offset] for reader, offset in zip(readers, offsets, strict=True)]
        if logprobs[0] is not None and logprobs[1] is not None:
            differences[place] = logprobs[1] - logprobs[0]
            sums[0] += logprobs[0]
            sums[1] += logprobs[1]

    def pair(place: int) -> Pair:
        indices = [place + offset for offset in offsets]
        tokens = [
            reader.token(index) if 0 <= index < length else None
            for reader, index, length in zip(readers, indices, lengths, strict=True)
        ]
        return Pair(place, tokens[0], tokens[1], differences.get(place))

    number = len(differences)
    are_alike = set(alike)
    by_size = sorted(differences, key=lambda place: (-abs(differences[place]), place))
    return Comparison(
        pairs=[pair(low + index) for index in range(start, min(start + MAX_SHOWN, num_places))],
        start=start,
        num_places=num_places,
        num_compared=number,
        first_unlike=next((place for place in common if place not in are_alike), None),
        mean=math.fsum(differences.values()) / number if number else None,
        mean_absolute=math.fsum(map(abs, differences.values())) / number if number else None,
        sums=(sums[0], sums[1]) if number else (None, None),
        perplexities=(finite_exp(-sums[0] / number), finite_exp(-sums[1] / number)) if number else (None, None),
        largest=[pair(place) for place in by_size[:NUM_LARGEST] if differences[place]],
        legend=difference_legend(),
    )


def _key(sequence: wire.SequenceResult, index: int) -> tuple[int, bytes]:
    """The same id is another token in another vocabulary."""
    return sequence.token_ids[index], sequence.token_bytes[index]


def step_of(difference: float) -> int:
    """Return the step of a difference, 0 to 2 * MIDDLE."""
    size = sum(abs(difference) > end for end in _ENDS)
    return MIDDLE + size if difference > 0 else MIDDLE - size


def difference_legend() -> list[str]:
    """Describe each step."""
    ends = [f"{end:g}" for end in _ENDS]
    below = [f"< -{end}" for end in reversed(ends)]
    return [*below, f"± {ends[0]}", *(f"> {end}" for end in ends)]


@router.get("/jobs/{id}/compare")
async def compare(
    job_id: JobId,
    viewer: JobViewerDep,
    jobs: JobsDep,
    held: ViewerResultsDep,
    other_id: Annotated[str, Query(alias="with", max_length=128)],
    sequence: Annotated[int, Query(ge=0)] = 0,
    other_sequence: Annotated[int | Literal[""], Query()] = "",
    start: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Show two results, and the difference of their logprobs. Without `other_sequence`, both have the same place."""
    second_sequence = sequence if other_sequence == "" else other_sequence
    first = await _result(jobs, viewer.owner, job_id, sequence, "sequence", held)
    second = await _result(jobs, viewer.owner, other_id.strip(), second_sequence, "other_sequence", held)

    def render() -> Response:
        sides = [
            {"id": job_id, "sequence": sequence, "result": first},
            {"id": other_id.strip(), "sequence": second_sequence, "result": second},
        ]
        one, other = first.unpacked().sequences[sequence], second.unpacked().sequences[second_sequence]
        shown = compare_sequences(one, other, start)
        return html(
            "compare.html",
            viewer=viewer,
            sides=sides,
            shown=shown,
            max_shown=MAX_SHOWN,
            logprob_legend=legend_of("logprob"),
        )

    num_tokens = sum(
        result.num_tokens if result.packed else len(result.sequences[place].token_ids)
        for result, place in ((first, sequence), (second, second_sequence))
    )
    return await held.rendered(render, is_large=num_tokens > MAX_INLINE_TOKENS)


async def _result(jobs: Jobs, owner: str, job_id: str, sequence: int, field: str, held: HeldResults) -> wire.Result:
    job = await jobs.read(owner, job_id, held)
    if job.result is None:
        raise BadRequest(f"job {wire.quote(job_id)}: expected a job with a result, it is {job.status}", "with")
    if not 0 <= sequence < len(job.result.sequences):
        expected = f"0 to {len(job.result.sequences) - 1}" if job.result.sequences else "a result with sequences"
        raise BadRequest(f"{field}: expected {expected}, found {sequence}", field)
    return job.result
