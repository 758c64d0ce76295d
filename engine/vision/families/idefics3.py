"""Idefics 3's and SmolVLM's images: a large one is cut into tiles of the tower's size, and shown whole after them.

<fake_token_around_image><row_1_col_1># # <fake_token_around_image><row_1_col_2># # \n ... \n
<fake_token_around_image><global-img># # <fake_token_around_image>
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models import idefics3
from PIL.Image import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from scorepool.engine.errors import LoadError
from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.family import ProcessedImage
from scorepool.engine.vision.tower import check_constants, load_tower

# What is computed whatever these settings are.
_CONSTANTS: dict[str, object] = {
    "vision_config.hidden_act": "gelu_pytorch_tanh",
    "vision_config.num_channels": 3,
    "vision_config.attention_dropout": 0.0,
}
_PROCESSOR = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True}
# Patches on a tile's side for which transformers gives each its own position. Of others, rounding makes some equal.
_SIDES = frozenset((*range(2, 19), 26, 27, 32))
_MAX_TILES = 4  # that the tower computes at once
_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


class Images:
    """The images of an Idefics 3 checkpoint; see FamilyImages."""

    name = "idefics3"
    injection = Injection()
    processor: type[Any] = Idefics3ImageProcessorPil

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Read the settings. Raises LoadError."""
        self.marker = self.spelled_marker = _IMAGE
        self.marker_id = self.feature_id = int(tokenizer.hf_tokenizer.convert_tokens_to_ids(_IMAGE))
        check_constants(config, {"image_token_id": self.marker_id})
        self._tokenizer, self._num_features = tokenizer, (_side(config) // config["scale_factor"]) ** 2
        self._processor: Any = self.processor.from_pretrained(folder)
        check_constants({name: getattr(self._processor, name) for name in _PROCESSOR}, _PROCESSOR)
        size, expected = self._processor.max_image_size["longest_edge"], config["vision_config"]["image_size"]
        if size != expected:
            raise LoadError(f"max_image_size is {size}, expected {expected} pixels, the tower's image_size")

    def process(self, image: Image) -> ProcessedImage:
        """Resize, cut and normalise an image; see FamilyImages."""
        found = self._processor([image], return_tensors="np", return_row_col_info=True)
        text = _spell(int(found["rows"][0][0]), int(found["cols"][0][0]), _IMAGE * self._num_features)
        token_ids, _ = self._tokenizer.encode(text, add_bos=False)
        pixels = found["pixel_values"][0].astype(np.float32)
        return ProcessedImage({"pixels": pixels}, token_ids, (0, 0))


class Tower:
    """SigLIP's tower and the connector of Idefics 3; see FamilyTower."""

    def __init__(self, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> None:
        """Load the weights. Raises LoadError."""
        check_constants(config, _CONSTANTS)
        _side(config)
        self.module = load_tower(idefics3, config, stored, dtype)
        tower: Any = self.module
        tower.vision_model.post_layernorm.eps = config["vision_config"]["layer_norm_eps"]
        self._dtype = dtype

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image, tile after tile; see FamilyTower."""
        tower: Any = self.module
        pixels = processed.arrays["pixels"]
        features: list[mx.array] = []
        for first in range(0, len(pixels), _MAX_TILES):
            tiles = mx.array(pixels[first : first + _MAX_TILES]).transpose(0, 2, 3, 1).astype(self._dtype)
            states, *_ = tower.vision_model(tiles)
            features.append(tower.connector(states))
            mx.eval(features[-1])  # otherwise all tiles take their memory at once
        joined = mx.concatenate(features)
        return joined.reshape(-1, joined.shape[-1])


def _spell(num_rows: int, num_columns: int, tile: str) -> str:
    """Return the text that stands for an image, which may be cut into tiles."""
    whole = f"{_AROUND}{_WHOLE}{tile}{_AROUND}"
    if not num_rows:
        return whole
    rows = [
        "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, num_columns + 1))
        for row in range(1, num_rows + 1)
    ]
    return "".join(f"{row}\n" for row in rows) + "\n" + whole


def _side(config: Config) -> int:
    """Return the patches on a tile's side. Raises LoadError for a number that was not compared."""
    vision, scale = config["vision_config"], int(config["scale_factor"])
    side = int(vision["image_size"]) // int(vision["patch_size"])
    if side not in _SIDES:
        raise LoadError(f"a tile has {side} patches on a side, expected one of {', '.join(map(str, sorted(_SIDES)))}")
    if side % scale:
        raise LoadError(f"scale_factor is {scale}, expected a divisor of {side}, the patches on a tile's side")
    return side
