"""vLLM's `priority` of a request: a number, of which lower ones are served first. Pure."""

from typing import Annotated

from msgspec import Meta

from scorepool import wire

PriorityNumber = (
    Annotated[
        int,
        Meta(
            ge=-(2**63),
            le=2**63 - 1,
            description="Below 0 is high, 0 and null normal, above 0 low: see `priority` of a job.",
        ),
    ]
    | None
)


def to_priority(number: int | None) -> wire.Priority:
    """Return the priority of a request's jobs."""
    if not number:
        return "normal"
    return "high" if number < 0 else "low"
