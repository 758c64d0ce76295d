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
