"""Qwen2-VL's images: as Qwen2.5-VL's, with another tower, all of whose layers see the whole image."""

from types import ModuleType

from mlx_vlm.models import qwen2_vl

from scorepool.engine.model.surveyed import Config
from scorepool.engine.vision.families import qwen2_5_vl


class Images(qwen2_5_vl.Images):
    """The images of a Qwen2-VL checkpoint; see FamilyImages."""

    name = "qwen2_vl"

    def _tokens_per_second(self, config: Config) -> None:
        """Return None: positions in time count patches."""


class Tower(qwen2_5_vl.Tower):
    """The tower and the merger of Qwen2-VL; see FamilyTower."""

    architecture: ModuleType = qwen2_vl
    model_type = "qwen2_vl"
    hidden_act = "quick_gelu"
