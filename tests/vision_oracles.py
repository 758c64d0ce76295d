"""transformers beside tiny models of texts and images: the tokens of texts that show images, and what follows them."""

from collections.abc import Sequence
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

IMAGE_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
QWEN_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
IDEFICS_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
GEMMA4_TOKENS = ["<|image>", "<|image|>", "<image|>"]
GEMMA_TOKENS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
_QWEN = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}  # Qwen3VLProcessor of later ones


class VisionOracle:
    """transformers' model and image processor, each sequence alone, without a cache.

    What stands for an image in a text is written by the method of the family's processor; most processors themselves
    need torchvision.
    """

    marker = IMAGE_TOKENS[0]

    def __init__(self, model: Any, images: Any, tokenizer: Any) -> None:
        self._model, self._images, self._tokenizer = model, images, tokenizer

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        return dict(self._found(images))

    def token_ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return the tokens of a text that has a marker for each image."""
        before, *after = text.split(self.marker)
        assert len(after) == len(images)
        found = self._found(images) if images else {}
        for index, following in enumerate(after):
            before += self._text_of(found, index) + following
        ids: list[int] = self._tokenizer.encode(before, add_special_tokens=False)
        return ids

    def logprobs(self, token_ids: list[int], images: Sequence[bytes] = ()) -> np.ndarray:
        """Return [length, vocab]: row t is the distribution of token t + 1."""
        with torch.no_grad():
            logits = self._model(**self.inputs(token_ids, images), use_cache=False).logits[0].double()
        return torch.log_softmax(logits, dim=-1).numpy()

    def inputs(self, token_ids: list[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return all inputs of the model."""
        return {"input_ids": torch.tensor([token_ids]), **(self.processed(images) if images else {})}

    def _found(self, images: Sequence[bytes]) -> Any:
        """Return what the processor of images makes of them."""
        return self._images(opened(images), return_tensors="pt", patch_size={"height": 8, "width": 8})

    def _text_of(self, found: Any, index: int) -> str:
        """Return the text that stands for an image; here as PixtralProcessor documents it."""
        height, width = found["image_sizes"][index].tolist()
        rows = [IMAGE_TOKENS[0] * (width // 8)] * (height // 8)
        return IMAGE_TOKENS[1].join(rows) + IMAGE_TOKENS[2]


class QwenOracle(VisionOracle):
    """The same of Qwen's families."""

    marker = "".join(QWEN_TOKENS)

    def inputs(self, token_ids: list[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return all inputs of the model."""
        return super().inputs(token_ids, images) | {"mm_token_type_ids": self._kinds(token_ids)}

    def _kinds(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor([[int(token_id == self._model.config.image_token_id) for token_id in token_ids]])

    def _found(self, images: Sequence[bytes]) -> Any:
        return self._images(opened(images), return_tensors="pt")

    def _text_of(self, found: Any, index: int) -> str:
        processor = _QWEN.get(self._model.config.model_type, Qwen3VLProcessor)
        names = SimpleNamespace(image_processor=self._images, image_token=QWEN_TOKENS[1])
        return QWEN_TOKENS[0] + processor.replace_image_token(names, found, index) + QWEN_TOKENS[2]


class GemmaOracle(VisionOracle):
    """The same of Gemma 3, whose processor needs no torchvision."""

    marker = GEMMA_TOKENS[0]

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        return {"pixel_values": self._images.image_processor(opened(images), return_tensors="pt")["pixel_values"]}

    def token_ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return the tokens of a text that has a marker for each image."""
        ids: list[int] = self._images(images=opened(images), text=text, add_special_tokens=False)["input_ids"][0]
        return ids

    def inputs(self, token_ids: list[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return all inputs of the model."""
        kinds = [[int(token_id == self._model.config.image_token_index) for token_id in token_ids]]
        return super().inputs(token_ids, images) | {"token_type_ids": torch.tensor(kinds)}


class Gemma4Oracle(QwenOracle):
    """The same of Gemma 4."""

    marker = GEMMA4_TOKENS[1]

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        found = self._found(images)
        return {name: found[name] for name in ("pixel_values", "image_position_ids")}

    def _text_of(self, found: Any, index: int) -> str:
        names = SimpleNamespace(**dict(zip(("boi_token", "image_token", "eoi_token"), GEMMA4_TOKENS, strict=True)))
        return Gemma4Processor.replace_image_token(names, found, index)


class IdeficsOracle(VisionOracle):
    """The same of Idefics 3 and SmolVLM."""

    marker = IDEFICS_TOKENS[0]

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        found = self._found(images)
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}

    def _found(self, images: Sequence[bytes]) -> Any:
        return self._images([opened(images)], return_tensors="pt", return_row_col_info=True)

    def _text_of(self, found: Any, index: int) -> str:
        processor = Idefics3Processor(self._images, self._tokenizer, image_seq_len=4)
        return processor.replace_image_token(found, index)


def opened(images: Sequence[bytes]) -> list[Image.Image]:
    return [Image.open(BytesIO(data)).convert("RGB") for data in images]
