"""SmolVLM2's images: as Idefics 3's, which the first SmolVLM are, too."""

from typing import Any

from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from scorepool.engine.vision.families import idefics3
from scorepool.engine.vision.families.idefics3 import Tower

__all__ = ["Images", "Tower"]


class Images(idefics3.Images):
    """The images of a SmolVLM2 checkpoint; see FamilyImages."""

    name = "smolvlm"
    processor: type[Any] = SmolVLMImageProcessorPil
