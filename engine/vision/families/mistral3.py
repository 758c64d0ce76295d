"""Mistral 3's images: Pixtral's tower, four patches to a feature, a token at the end of each row of features.

[IMG] [IMG] [IMG_BREAK] [IMG] [IMG] [IMG_END]      two rows of two features
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models import mistral3
from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor
from PIL.Image import Image

from scorepool.engine.errors import LoadError
from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.family import ProcessedImage
from scorepool.engine.vision.tower import check_constants, load_tower

# What mlx-vlm computes whatever these settings are.
_CONSTANTS: dict[str, object] = {
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_config.model_type": "pixtral",
    "vision_config.hidden_act": "silu",
    "vision_config.num_channels": 3,
    "vision_config.rope_parameters.rope_type": "axial",
}
_PROCESSOR = {"do_resize": True, "do_center_crop": False}
_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


class Images:
    """The images of a Mistral 3 checkpoint; see FamilyImages."""

    name = "mistral3"
    injection = Injection()

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Read the settings. Raises LoadError."""
        vision = config["vision_config"]
        self.marker = self.spelled_marker = _TOKENS[0]
        self.marker_id, self._break_id, self._end_id = tokenizer.hf_tokenizer.convert_tokens_to_ids(list(_TOKENS))
        self.feature_id = self.marker_id
        self._cell = int(vision["patch_size"]) * int(config["spatial_merge_size"])  # pixels of the side of a feature
        self._processor = PixtralImageProcessor.from_pretrained(str(folder))
        check_constants(config, {"image_token_index": self.marker_id})
        check_constants({name: getattr(self._processor, name, False) for name in _PROCESSOR}, _PROCESSOR)
        longest = max(self._processor.size.values())
        if longest > vision["image_size"]:
            raise LoadError(
                f"size is {longest} pixels, expected at most {vision['image_size']}, the tower's image_size"
            )

    def process(self, image: Image) -> ProcessedImage:
        """Resize and normalise an image; see FamilyImages."""
        found = self._processor([image], patch_size=self._cell)
        height, width = found["image_sizes"][0]
        num_rows, num_columns = height // self._cell, width // self._cell
        row = [self.marker_id] * num_columns
        token_ids = [*[*row, self._break_id] * (num_rows - 1), *row, self._end_id]
        arrays = {"pixels": found["pixel_values"], "sizes": np.array([[height, width]])}
        return ProcessedImage(arrays, token_ids, (num_rows, num_columns))


class Tower:
    """Pixtral's tower and the projector of Mistral 3; see FamilyTower."""

    def __init__(self, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> None:
        """Load the weights. Raises LoadError."""
        vision = config["vision_config"]
        head_dim = vision["hidden_size"] // vision["num_attention_heads"]
        check_constants(config, _CONSTANTS | {"vision_config.head_dim": head_dim})
        theta = vision["rope_parameters"]["rope_theta"]
        self.module = load_tower(mistral3, config | {"vision_config": vision | {"rope_theta": theta}}, stored, dtype)

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image; see FamilyTower."""
        tower: Any = self.module
        sizes = processed.arrays["sizes"].tolist()
        pixels = mx.array(processed.arrays["pixels"]).transpose(0, 2, 3, 1)
        *_, states = tower.vision_tower(pixels, output_hidden_states=True, image_sizes=sizes)
        features: mx.array = tower.multi_modal_projector(states[-1], sizes)
        return features
