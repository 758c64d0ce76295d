"""Qwen3-VL's images for a language model of experts. The tower is that of qwen3_vl; mlx-vlm's own has other GELUs."""

from scorepool.engine.vision.families import qwen3_vl
from scorepool.engine.vision.families.qwen3_vl import Tower

__all__ = ["Images", "Tower"]


class Images(qwen3_vl.Images):
    """The images of a Qwen3-VL checkpoint with experts; see FamilyImages."""

    name = "qwen3_vl_moe"
