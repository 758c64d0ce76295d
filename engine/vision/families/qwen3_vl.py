"""Qwen3-VL's images: as Qwen2.5-VL's, with features of the tower's layers for early layers of the language model.

The axes of M-RoPE take turns among the frequencies of a head: time, row, column, time, row, column, ... time, time.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import qwen3_vl

from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.families import qwen2_5_vl
from scorepool.engine.vision.family import ProcessedImage


class Images(qwen2_5_vl.Images):
    """The images of a Qwen3-VL checkpoint; see FamilyImages."""

    name = "qwen3_vl"

    def _open_videos(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Return None: its videos have timestamps as text, which were not compared."""

    def _injection(self, config: Config) -> Injection:
        _, rows, columns = sections = config["text_config"]["rope_parameters"]["mrope_section"]
        axes = [0] * sum(sections)
        axes[1 : 3 * rows : 3] = [1] * rows
        axes[2 : 3 * columns : 3] = [2] * columns
        num_deep = len(config["vision_config"].get("deepstack_visual_indexes", ()))
        return Injection(axes=tuple(axes), num_deep_layers=num_deep)


class Tower(qwen2_5_vl.Tower):
    """The tower and the mergers of Qwen3-VL; see FamilyTower."""

    architecture: ModuleType = qwen3_vl
    model_type = "qwen3_vl"
    hidden_act = "gelu_pytorch_tanh"

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image, and beside them those of deep layers; see FamilyTower."""
        tower: Any = self.module
        pixels = mx.array(processed.arrays["pixels"]).astype(self._dtype)
        features, deep = tower.vision_tower(pixels, mx.array(processed.arrays["grid"]))
        return mx.concatenate([features, *deep], axis=1)
