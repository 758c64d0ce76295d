"""Define what every request has: the model, and how its job is queued.

A request is written without the fields that have their default, so that a release which does not know a new field still
reads every request that does not use it. Decoding is strict: an unknown field is refused.
"""

from functools import cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import fields, force_setattr

from scorepool.wire.request_fields import IfWeights, ModelName, Priority

MAX_TIMEOUT_S = 86_400


class Submission(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Hold the fields that every kind of job has: its model and how it is queued."""

    model: ModelName
    priority: Priority = "normal"
    timeout_s: Annotated[
        int, Meta(ge=1, le=MAX_TIMEOUT_S, description="Seconds after its start at which it fails.")
    ] = 600
    expires_at: (
        Annotated[float, Meta(ge=0, le=1e11, description="Unix time, in seconds, after which it is not run.")] | None
    ) = None
    webhook: (
        Annotated[str, Meta(min_length=1, max_length=2048, description="URL that receives an event when it ends.")]
        | None
    ) = None
    adapter: Annotated[
        ModelName | None,
        Meta(description="LoRA adapter of the model that computes it. Or name it as `model`. null: the model alone."),
    ] = None
    if_weights: IfWeights = None
    wait_for_model: Annotated[bool, Meta(description="Accept the job even if no live worker serves the model.")] = False

    def __post_init__(self) -> None:
        """Replace each value that equals its default by the default itself: msgspec omits a default by identity."""
        for name, default in _defaults(type(self)):
            value = getattr(self, name)
            if value is not default and value == default:
                force_setattr(self, name, default)


@cache
def _defaults(kind: type[Submission]) -> tuple[tuple[str, object], ...]:
    """Return the name and the default of every field whose default is a number, a boolean or a string."""
    return tuple((each.name, each.default) for each in fields(kind) if isinstance(each.default, int | float | str))
