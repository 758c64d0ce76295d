"""Gemma 3's images: SigLIP's tower at one size, and as many features of every image, which attend to each other.

\n\n <start_of_image> # # ... # <end_of_image> \n\n        256 features in the published checkpoints
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models import gemma3
from PIL.Image import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from scorepool.engine.errors import LoadError
from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.family import ProcessedImage
from scorepool.engine.vision.tower import check_constants, load_tower

# What mlx-vlm computes whatever these settings are.
_CONSTANTS: dict[str, object] = {
    "vision_config.hidden_act": "gelu_pytorch_tanh",
    "vision_config.num_channels": 3,
    "vision_config.attention_dropout": 0.0,
}
_START, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Images:
    """The images of a Gemma 3 checkpoint; see FamilyImages."""

    name = "gemma3"
    injection = Injection(attends_ahead=True)

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Read the settings. Raises LoadError."""
        self.marker, self.spelled_marker = _START, f"\n\n{_START}\n\n"
        ids = tokenizer.hf_tokenizer.convert_tokens_to_ids([_START, _IMAGE, _END])
        self.marker_id, self.feature_id, self._end_id = ids
        names = ("boi_token_index", "image_token_index", "eoi_token_index")
        check_constants(config, dict(zip(names, ids, strict=True)))
        self._side = _side(config)
        self._processor: Any = Gemma3ImageProcessorPil.from_pretrained(folder)
        check_constants({"do_resize": self._processor.do_resize}, {"do_resize": True})
        if self._processor.do_pan_and_scan:
            raise LoadError("do_pan_and_scan is true, expected false: an image is shown whole, without crops")
        size, expected = self._processor.size, config["vision_config"]["image_size"]
        if any(getattr(size, name) != expected for name in ("height", "width")):
            raise LoadError(f"size is {dict(size)}, expected {expected} pixels a side, the tower's image_size")

    def process(self, image: Image) -> ProcessedImage:
        """Resize and normalise an image; see FamilyImages."""
        found = self._processor([image], return_tensors="np", do_convert_rgb=True)
        token_ids = [self.marker_id, *[self.feature_id] * self._side**2, self._end_id]
        return ProcessedImage({"pixels": found["pixel_values"]}, token_ids, (self._side, self._side))


class Tower:
    """SigLIP's tower and the projector of Gemma 3; see FamilyTower."""

    def __init__(self, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> None:
        """Load the weights. Raises LoadError."""
        check_constants(config, _CONSTANTS)
        num_features = {"mm_tokens_per_image": config["mm_tokens_per_image"]}  # mlx-vlm reads it in the other section
        config = config | {"text_config": config["text_config"] | num_features}
        self.module = load_tower(gemma3, config, {_published_name(name): stored[name] for name in stored}, dtype)
        tower: Any = self.module
        tower.vision_tower.vision_model.post_layernorm.eps = config["vision_config"]["layer_norm_eps"]
        _side(config)
        self._dtype = dtype
        self._scale = mx.array(config["text_config"]["hidden_size"] ** 0.5, dtype)  # the language model's embeddings'

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image; see FamilyTower."""
        tower: Any = self.module
        pixels = mx.array(processed.arrays["pixels"]).transpose(0, 2, 3, 1).astype(self._dtype)
        states, *_ = tower.vision_tower(pixels)
        features: mx.array = tower.multi_modal_projector(states)[0]
        return features / self._scale


def _published_name(name: str) -> str:
    """Return the name of a tensor as checkpoints were published. transformers 5 saves the tower's without one part."""
    part, _, rest = name.partition("vision_tower.")
    return name if part or not rest or rest.startswith("vision_model.") else f"vision_tower.vision_model.{rest}"


def _side(config: Config) -> int:
    """Return the side of the square of features of an image. Raises LoadError if patches do not make it up."""
    vision, count = config["vision_config"], int(config["mm_tokens_per_image"])
    num_patches, side = vision["image_size"] // vision["patch_size"], int(count**0.5)
    if side * side != count or num_patches % side:
        raise LoadError(
            f"mm_tokens_per_image is {count}, expected a square whose side divides {num_patches}, the patches of a side"
        )
    return side
