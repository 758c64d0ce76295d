"""Read `top_k`, the most likely tokens that are sampled from, as clients of other servers send it. Pure."""

from typing import Annotated

from msgspec import Meta

from scorepool.wire.request_fields import MAX_SAMPLED_TOP_K

MAX_GIVEN = 2**31 - 1  # some clients send a large number for every token
SampledTopK = Annotated[
    int, Meta(ge=-1, le=MAX_GIVEN, description="0, -1 and numbers above 1,000,000 keep every token.")
]


def to_top_k(given: int | None) -> int:
    """Return the `top_k` of a job: 0 for a number that keeps every token."""
    return given if given is not None and 0 < given <= MAX_SAMPLED_TOP_K else 0
