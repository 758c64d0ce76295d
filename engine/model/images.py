"""Say whether a checkpoint takes images, and open what computes them. Imports mlx-vlm only if it does."""

import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.images import ImageCodec
from scorepool.engine.model import checkpoint, tower_attention
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.config import Config
from scorepool.engine.model.image_backbone import ImageBackbone
from scorepool.engine.model.surveyed import canonical_config
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_VISION = "scorepool.engine.vision"
_FAMILIES = f"{_VISION}.families"  # modules named by their model_type


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model of texts that was loaded from a checkpoint."""

    folder: Path
    config: Config
    model: Any
    split: BackboneAndHead
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedImages:
    """What a model makes of images; or why it takes none, though its checkpoint could."""

    codec: ImageCodec | None = None
    split: BackboneAndHead | None = None  # the model, whose sequences may show images
    tower: Any = None
    unsupported: str | None = None


def open_images(text_model: TextModel, settings: EngineSettings) -> OpenedImages:
    """Open the images of a checkpoint that has them. Never raises: a checkpoint without them serves texts."""
    if not text_model.config.get("vision_config"):
        return OpenedImages()
    reason = _reason(text_model.config["model_type"], settings)
    if reason is None:
        try:
            with as_load_error("images"):
                return _open(text_model, settings.max_video_frames)
        except LoadError as error:
            reason = error.message
    log.warning("%s serves texts only, no images: %s", settings.model, reason)
    return OpenedImages(unsupported=reason)


def _reason(model_type: str, settings: EngineSettings) -> str | None:
    """Return why no images are served; None if nothing is known against it."""
    if not model_type.isidentifier() or find_spec(f"{_FAMILIES}.{model_type}") is None:
        return f"those of models of type {model_type} were not compared with transformers"
    if find_spec("mlx_vlm") is None:
        return "the worker is installed without the extra `vision`"
    if settings.mode == "exact":
        return "the worker runs in exact mode"
    if settings.ranks > 1:
        return f"the worker has {settings.ranks} ranks"
    return None


def _open(text_model: TextModel, max_video_frames: int) -> OpenedImages:
    config, canonical = text_model.config, canonical_config(text_model.config) or {}
    config = canonical | config | {"vision_config": config["vision_config"] | canonical.get("vision_config", {})}
    family = import_module(f"{_FAMILIES}.{config['model_type']}")
    model, folder = text_model.model, text_model.folder
    tower = family.Tower(config, checkpoint.stored_tensors(folder), checkpoint.main_dtype(model))
    tower_attention.install(tower.module)
    images = family.Images(folder, config, text_model.tokenizer)
    processor = import_module(f"{_VISION}.codec").ImageProcessor(images, max_video_frames)
    encoder = import_module(f"{_VISION}.encoder").ImageEncoder(tower, processor)
    backbone = ImageBackbone(model, text_model.split, encoder, images.injection)
    return OpenedImages(processor, backbone, tower.module)
