"""Versions of a model's weights: what a push says, what Redis keeps, and what the API shows."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

OnRunning = Literal["finish", "restart"]
MAX_VERSION = 2**53 - 1
Version = Annotated[int, Meta(ge=1, le=MAX_VERSION)]
Label = Annotated[str, Meta(min_length=1, max_length=256)]


class PushWeights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load other weights of the same architecture from a folder."""

    path: Annotated[
        str,
        Meta(min_length=1, max_length=4096, description="A folder with model*.safetensors, on every machine."),
    ]
    version: Annotated[Version | None, Meta(description="Greater than that which serves; null: the next one.")] = None
    label: Annotated[Label | None, Meta(description="A name of your own, shown with the version.")] = None
    on_running: Annotated[
        OnRunning, Meta(description="Jobs that have begun end on the weights before, or begin anew.")
    ] = "finish"


class WeightsSource(Struct, frozen=True, kw_only=True):
    """Where a version comes from. The API writes it, workers read it."""

    id: str = ""  # of the push: a version that was refused may be pushed again
    path: str | None = None  # a folder on the workers' machines
    upload: str | None = None  # the id of what was sent, in `num_chunks` chunks of together `num_bytes`
    num_chunks: int = 0
    num_bytes: int = 0
    label: str | None = None
    on_running: OnRunning = "finish"


class WorkerWeights(Struct, frozen=True, kw_only=True):
    """Say which version one live worker serves."""

    worker: Annotated[str, Meta(description="The worker's name.")]
    version: int
    since: Annotated[float | None, Meta(description="Unix time, in seconds; null: since its start.")] = None


class WeightsState(Struct, frozen=True, kw_only=True):
    """Show the versions of a model's weights.

    `state` is `serving` if every live worker serves `version`, `switching` while some still end jobs on another one,
    and `loading` while workers load and check `pending`.
    """

    model: str
    state: Literal["serving", "loading", "switching"]
    version: Annotated[int, Meta(description="0: the weights that the workers were started with.")]
    label: str | None = None
    fingerprint: Annotated[str | None, Meta(description="Null for version 0.")] = None
    path: Annotated[str | None, Meta(description="The folder that it was loaded from; null: it was sent.")] = None
    pending: Annotated[int | None, Meta(description="The version that is being loaded.")] = None
    failed: Annotated[int | None, Meta(description="The last version that was refused, after `version`.")] = None
    error: Annotated[str | None, Meta(description="The reason why it was refused.")] = None
    workers: list[WorkerWeights] = []
