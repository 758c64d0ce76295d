"""Apply the server's cap on top logprobs, SCOREPOOL_MAX_TOP_LOGPROBS, to the bodies of dialects. Pure."""

from typing import Annotated, TypeVar

from msgspec import Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool.wire.request import exceeds_top_cap

MaxTopLogprobsIfClamped = Annotated[
    int | UnsetType,
    Meta(
        description="Present if the request asked for more most likely tokens than the server allows "
        "(SCOREPOOL_MAX_TOP_LOGPROBS): the number that it was clamped to."
    ),
]
AnyBody = TypeVar("AnyBody", bound=Struct)


def clamp_fields(body: AnyBody, cap: int, *names: str) -> AnyBody:
    """Return the body with the named numbers of top logprobs clamped; the same object if none is above the cap."""
    changes = {name: cap for name in names if (k := getattr(body, name)) is not None and exceeds_top_cap(k, cap)}
    return replace(body, **changes) if changes else body
