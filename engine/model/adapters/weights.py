"""What a folder says about an adapter, in one form for all formats."""

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one layer: x ↦ y + B(A x), with the scale in B. All arrays are float32.

    a [rank, in], b [rank, out]. `magnitude` [out] is DoRA's: the norm that each row of the changed weight has.
    """

    a: mx.array
    b: mx.array
    magnitude: mx.array | None = None

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The changes of all layers, by the layer's path: in the base checkpoint, or in mlx-lm's model of it."""

    fingerprint: str
    layers: dict[str, LowRank] = field(default_factory=dict)
    part_names: tuple[str, str, str] = ("lora_A", "lora_B", "lora_magnitude_vector")  # of A, B and magnitudes
    names_checkpoint: bool = True

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def kind(self) -> str:
        """Name what the layers are."""
        return "dora" if any(layer.magnitude is not None for layer in self.layers.values()) else "lora"
