"""A LoRA adapter that is loaded: which one, and what it takes. No tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. Two that were loaded under one name, one after the other, are not equal."""

    name: str
    fingerprint: str  # sha256 over the adapter's configuration and tensors
    folder: str
    rank: int  # the highest of its layers
    kind: str  # "lora" or "dora"

    @property
    def label(self) -> str:
        """Name the adapter and the beginning of its fingerprint, as results' stamps do."""
        return f"{self.name}@{self.fingerprint[:16]}"


def describe_excess(num_bytes: int, max_bytes: int) -> str:
    """Say that adapters would take too much memory."""
    return (
        f"with it, the adapters of this worker take {num_bytes} bytes, expected at most {max_bytes}, half of what "
        "weights and prefix cache leave; unload one, take one of a lower rank, or give more memory"
    )
