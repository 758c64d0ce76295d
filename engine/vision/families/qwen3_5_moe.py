"""Qwen3.5's images for a language model of experts."""

from types import ModuleType

from mlx_vlm.models import qwen3_5_moe

from scorepool.engine.vision.families import qwen3_5


class Images(qwen3_5.Images):
    """The images of a Qwen3.5 checkpoint with experts; see FamilyImages."""

    name = "qwen3_5_moe"


class Tower(qwen3_5.Tower):
    """The tower and the merger of Qwen3.5; see FamilyTower."""

    architecture: ModuleType = qwen3_5_moe
    model_type = "qwen3_5_moe"
