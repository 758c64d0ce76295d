"""Qwen3.5's images: as Qwen3-VL's, without features for early layers; a part of each head has positions."""

from types import ModuleType

from mlx_vlm.models import qwen3_5

from scorepool.engine.vision.families import qwen3_vl


class Images(qwen3_vl.Images):
    """The images of a Qwen3.5 checkpoint; see FamilyImages."""

    name = "qwen3_5"


class Tower(qwen3_vl.Tower):
    """The tower and the merger of Qwen3.5; see FamilyTower."""

    architecture: ModuleType = qwen3_5
    model_type = "qwen3_5"
