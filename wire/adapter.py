"""Define messages about LoRA adapters that are loaded and unloaded while a server runs. Fields are vLLM's."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool.wire.request_fields import ModelName

BaseModel = Annotated[ModelName | None, Meta(description="The base model. Needed if several models are served.")]


class LoadAdapter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load a LoRA adapter on all live workers of its base model."""

    lora_name: ModelName
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096, description="Its folder on the workers' machines, an absolute path.")
    ]
    load_inplace: Annotated[bool, Meta(description="Replace an adapter of the same name.")] = False
    is_3d_lora_weight: Annotated[bool, Meta(description="Only false: experts are not changed.")] = False
    model: BaseModel = None

    def __post_init__(self) -> None:
        if self.is_3d_lora_weight:
            raise ValueError("`is_3d_lora_weight` must be false: adapters of experts are not loaded")
        if not self.lora_path.startswith(("/", "~")):
            raise ValueError("`lora_path` must be the absolute path of a folder on the workers' machines")


class UnloadAdapter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Unload a LoRA adapter from all live workers of its base model. Jobs that run with it end."""

    lora_name: ModelName
    lora_int_id: Annotated[int | None, Meta(description="Has no effect: the name says which.")] = None
    model: BaseModel = None


class AdapterRecord(Struct, frozen=True, kw_only=True):
    """Hold in Redis what the workers of a model do with the adapter of a name.

    A staged record holds the one before it, which stays in force: the process that decides may die.
    """

    serial: str  # of this act; the same act of all workers
    path: str
    state: Literal["staged", "served", "unloaded"]
    before: "AdapterRecord | None" = None  # of a staged one, if there is one; another release may ignore it

    @property
    def in_force(self) -> "AdapterRecord | None":
        """Return the record that says what is served under the name; None if there is none yet."""
        return self.before if self.state == "staged" else self


class AdapterReport(Struct, frozen=True, kw_only=True):
    """Say how one worker has staged an adapter."""

    fingerprint: str | None = None
    error: str | None = None
