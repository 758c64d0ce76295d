"""Gemma 4's images: patches of an image in its own shape, nine to a feature, up to a number of features.

<|image> # # ... # <image|>
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models import gemma4
from PIL.Image import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from scorepool.engine.errors import LoadError
from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.family import ProcessedImage
from scorepool.engine.vision.tower import check_constants, load_tower

# What mlx-vlm computes whatever these settings are.
_CONSTANTS: dict[str, object] = {
    "vision_config.hidden_activation": "gelu_pytorch_tanh",
    "vision_config.attention_bias": False,
    "vision_config.attention_dropout": 0.0,
    "vision_config.rms_norm_eps": 1e-6,
    "vision_config.rope_parameters.rope_type": "axial",
}
_PROCESSOR = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False}
_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


class Images:
    """The images of a Gemma 4 checkpoint; see FamilyImages."""

    name = "gemma4"

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Read the settings. Raises LoadError."""
        ids = [int(config[name]) for name in _TOKENS]
        texts = tokenizer.hf_tokenizer.convert_ids_to_tokens(ids)
        for name, token_id, text in zip(_TOKENS, ids, texts, strict=True):
            if text is None:
                raise LoadError(f"{name} is {token_id}, expected the id of a token of the tokenizer")
        self.marker = self.spelled_marker = str(texts[0])
        self.marker_id = self.feature_id = ids[0]
        self._start_id, self._end_id = ids[1:]
        self.injection = _injection(config["text_config"])
        self._processor: Any = Gemma4ImageProcessorPil.from_pretrained(folder)
        check_constants({name: getattr(self._processor, name) for name in _PROCESSOR}, _PROCESSOR)
        of_tower = {name: config["vision_config"][name] for name in ("patch_size", "pooling_kernel_size")}
        check_constants({name: getattr(self._processor, name) for name in of_tower}, of_tower)
        self._pooled = int(of_tower["pooling_kernel_size"])

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image and cut it into patches; see FamilyImages."""
        found = self._processor([image], return_tensors="np")
        num_features = int(found["num_soft_tokens_per_image"][0])
        num_patches = num_features * self._pooled**2  # the others are padding
        arrays = {
            "patches": found["pixel_values"][0][:num_patches],
            "places": found["image_position_ids"][0][:num_patches],
        }
        num_columns, num_rows = (arrays["places"].max(axis=0) + 1) // self._pooled
        token_ids = [self._start_id, *[self.feature_id] * num_features, self._end_id]
        return ProcessedImage(arrays, token_ids, (int(num_rows), int(num_columns)))


class Tower:
    """The tower of Gemma 4 and what projects its features; see FamilyTower."""

    def __init__(self, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> None:
        """Load the weights. Raises LoadError."""
        check_constants(config, _CONSTANTS)
        self.module = load_tower(gemma4, config | {"audio_config": None}, stored, dtype)
        self._scale = config["text_config"]["hidden_size"] ** 0.5  # the language model's embeddings'

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image; see FamilyTower."""
        tower: Any = self.module
        patches, places = mx.array(processed.arrays["patches"]), mx.array(processed.arrays["places"])
        features: mx.array = tower.embed_vision(tower.vision_tower(patches, places))[0] / self._scale
        return features


def _injection(text: Config) -> Injection:
    """Return what images change in the language model. Raises LoadError for a mixture that no checkpoint has."""
    sees_ahead = text.get("use_bidirectional_attention") == "vision"
    if sees_ahead and text.get("num_kv_shared_layers"):
        raise LoadError(
            "use_bidirectional_attention is 'vision' and num_kv_shared_layers is "
            f"{text['num_kv_shared_layers']}, expected 0: layers with the keys of others were not compared"
        )
    layer_input_id = int(text.get("pad_token_id") or 0) if text.get("hidden_size_per_layer_input") else None
    return Injection(attends_ahead=sees_ahead, only_sliding_ahead=sees_ahead, layer_input_id=layer_input_id)
