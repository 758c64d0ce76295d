"""Say whether a checkpoint takes images, and open what computes them. Imports mlx-vlm only if it does."""

import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.images import ImageCodec
from scorepool.engine.model.axial_positions import AxialPositions
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.config import Config
from scorepool.engine.model.image_backbone import ImageBackbone
from scorepool.engine.model.surveyed import canonical_config
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_FAMILIES = ("mistral3", "qwen2_5_vl", "qwen2_vl")  # by model_type, which is the name of the module


@dataclass(frozen=True, slots=True)
class OpenedImages:
    """What a model makes of images; or why it takes none, though its checkpoint could."""

    codec: ImageCodec | None = None
    split: BackboneAndHead | None = None  # the model, whose sequences may show images
    tower: Any = None
    unsupported: str | None = None


def open_images(
    folder: Path,
    config: Config,
    model: Any,
    split: BackboneAndHead,
    stored: dict[str, mx.array],
    tokenizer: Tokenizer,
    dtype: mx.Dtype,
    settings: EngineSettings,
) -> OpenedImages:
    """Open the images of a checkpoint that has them. Never raises: a checkpoint without them serves texts."""
    if not config.get("vision_config"):
        return OpenedImages()
    reason = _reason(config, settings)
    if reason is None:
        try:
            with as_load_error("images"):
                return _open(folder, config, model, split, stored, tokenizer, dtype)
        except LoadError as error:
            reason = error.message
    log.warning("%s serves texts only, no images: %s", settings.model, reason)
    return OpenedImages(unsupported=reason)


def _reason(config: Config, settings: EngineSettings) -> str | None:
    """Return why no images are served; None if nothing is known against it."""
    if config["model_type"] not in _FAMILIES:
        return f"those of models of type {config['model_type']} were not compared with transformers"
    if find_spec("mlx_vlm") is None:
        return "the worker is installed without the extra `vision`"
    if settings.mode == "exact":
        return "the worker runs in exact mode"
    if settings.ranks > 1:
        return f"the worker has {settings.ranks} ranks"
    return None


def _open(
    folder: Path,
    config: Config,
    model: Any,
    split: BackboneAndHead,
    stored: dict[str, mx.array],
    tokenizer: Tokenizer,
    dtype: mx.Dtype,
) -> OpenedImages:
    canonical = canonical_config(config) or {}
    config = canonical | config | {"vision_config": config["vision_config"] | canonical.get("vision_config", {})}
    room = "scorepool.engine.vision"
    family = import_module(f"{room}.{config['model_type']}")
    tower = family.Tower(config, stored, dtype)
    processor = import_module(f"{room}.codec").ImageProcessor(family.Images(folder, config, tokenizer))
    encoder = import_module(f"{room}.encoder").ImageEncoder(tower, processor)
    axes = AxialPositions(model, family.sections(config)) if hasattr(family, "sections") else None
    return OpenedImages(processor, ImageBackbone(model, split, encoder, axes), tower.module)
