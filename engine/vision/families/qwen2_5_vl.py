"""Qwen2.5-VL's images: a tower with windows of attention, whose merger makes a feature of four patches.

Text and images count positions on three axes: time, row, column. See model/axial_positions.py.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import qwen2_5_vl
from PIL.Image import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from scorepool.engine.images import Injection
from scorepool.engine.model.surveyed import Config
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.vision.family import FamilyVideos, ProcessedImage
from scorepool.engine.vision.qwen_videos import QwenVideos
from scorepool.engine.vision.tower import check_constants, load_tower

# What mlx-vlm computes whatever these settings are.
_CONSTANTS: dict[str, object] = {
    "vision_config.rope_parameters.rope_type": "axial",
    "vision_config.rope_parameters.rope_theta": 10_000.0,
}
_START, _IMAGE, _VIDEO, _END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
_OF_VIDEOS = "video_preprocessor_config.json"


class Images:
    """The images of a Qwen2.5-VL checkpoint; see FamilyImages."""

    name = "qwen2_5_vl"

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer) -> None:
        """Read the settings. Raises LoadError."""
        vision = config["vision_config"]
        self.marker = self.spelled_marker = f"{_START}{_IMAGE}{_END}"
        self.marker_id = self.feature_id = int(tokenizer.hf_tokenizer.convert_tokens_to_ids(_IMAGE))
        self.injection = self._injection(config)
        self._merge = int(vision["spatial_merge_size"])
        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
        check_constants(config, {"image_token_id": self.marker_id})
        check_constants({"do_resize": self._processor.do_resize}, {"do_resize": True})
        own = {name: getattr(self._processor, name) for name in ("patch_size", "temporal_patch_size")}
        check_constants(own | {"merge_size": self._processor.merge_size}, _of_tower(vision))
        self.videos = self._open_videos(folder, config, tokenizer)

    def process(self, image: Image) -> ProcessedImage:
        """Resize and normalise an image; see FamilyImages."""
        found = self._processor([image], return_tensors="np")
        _, height, width = found["image_grid_thw"][0].tolist()
        grid = height // self._merge, width // self._merge
        arrays = {"pixels": found["pixel_values"], "grid": found["image_grid_thw"]}
        return ProcessedImage(arrays, [self.marker_id] * (grid[0] * grid[1]), grid)

    def _open_videos(self, folder: Path, config: Config, tokenizer: Tokenizer) -> FamilyVideos | None:
        """Return the checkpoint's videos; None if it takes none, or has settings of its own for them."""
        marker_id = tokenizer.hf_tokenizer.convert_tokens_to_ids(_VIDEO)
        if config.get("video_token_id") != marker_id or (folder / _OF_VIDEOS).exists():
            return None
        return QwenVideos(f"{_START}{_VIDEO}{_END}", marker_id, self._processor, self._tokens_per_second(config))

    def _tokens_per_second(self, config: Config) -> float | None:
        """Return how many positions a second of a video takes."""
        return float(config["vision_config"]["tokens_per_second"])

    def _injection(self, config: Config) -> Injection:
        """Return the axes of M-RoPE: first the frequencies of time, then those of rows, then those of columns."""
        sections = config["text_config"]["rope_parameters"]["mrope_section"]
        return Injection(axes=tuple(axis for axis, count in enumerate(sections) for _ in range(count)))


class Tower:
    """The tower and the merger of Qwen2.5-VL; see FamilyTower."""

    architecture: ModuleType = qwen2_5_vl
    model_type = "qwen2_5_vl"  # of the tower, as mlx-vlm names it
    hidden_act = "silu"  # whatever the setting is

    def __init__(self, config: Config, stored: dict[str, mx.array], dtype: mx.Dtype) -> None:
        """Load the weights. Raises LoadError."""
        check_constants(config, _CONSTANTS | {"vision_config.hidden_act": self.hidden_act})
        vision = config["vision_config"] | {"model_type": self.model_type}
        self.module = load_tower(self.architecture, config | {"vision_config": vision}, stored, dtype)
        self._dtype = dtype

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features of an image; see FamilyTower."""
        tower: Any = self.module
        pixels = mx.array(processed.arrays["pixels"]).astype(self._dtype)
        features: mx.array = tower.vision_tower(pixels, mx.array(processed.arrays["grid"]))
        return features


def _of_tower(vision: Config) -> dict[str, object]:
    """Return what the processor's settings must be for the tower."""
    same = ("patch_size", "temporal_patch_size")
    return {"merge_size": vision["spatial_merge_size"], **{name: vision[name] for name in same}}
