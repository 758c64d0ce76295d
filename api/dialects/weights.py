"""Say in replies of dialects which version of the weights computed them. Pure."""

from collections.abc import Iterable
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from scorepool import wire

WeightsVersion = Annotated[
    int | UnsetType | None,
    Meta(
        description="The version of the weights that computed the reply. Present if weights were pushed, or with "
        "`if_weights`. null: several versions, each for some of the prompts."
    ),
]
LastWeightsVersion = Annotated[
    int | UnsetType | None,
    Meta(
        description="The version of the weights that generated the choice, in its last chunk. Present if weights were "
        "pushed, or with `if_weights`."
    ),
]


def weights_version(results: Iterable[wire.Result], if_weights: int | None) -> int | UnsetType | None:
    """Return what a reply shows: nothing for the weights that workers started with, unless a version is asked for."""
    found = {result.stamp.weights_version for result in results}
    if len(found) > 1:
        return None
    [version] = found
    if version is None or (version == 0 and if_weights is None):
        return UNSET
    return version
