"""Tiny models of texts and images in Hugging Face form, with seeded random weights, and transformers beside them."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from survey import reference
from survey.families import FAMILIES
from tests.tiny_tokenizer import build_tokenizer

IMAGE_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
QWEN_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 4,
    "hidden_act": "silu",
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}


def build_mistral3(folder: Path, seed: int = 0, **changes: Any) -> "VisionOracle":
    """Write a tiny Mistral 3 into a folder. Return transformers with the same weights."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    tokenizer.chat_template = TEMPLATE
    settings = {
        "model_type": "mistral3",
        "text_config": _TEXT,
        "vision_config": _VISION,
        "spatial_merge_size": 2,
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": False,
    }
    model = reference.build_model(reference.build_config(settings), seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    images.save_pretrained(folder)
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return VisionOracle(model, images, tokenizer)


def build_qwen2_5_vl(folder: Path, seed: int = 0, **changes: Any) -> "VisionOracle":
    """Write a tiny Qwen2.5-VL into a folder, as it was published. Return transformers with the same weights."""
    return _build_qwen(folder, seed, "qwen2_5_vl", _QWEN_VISION, changes)


def build_qwen2_vl(folder: Path, seed: int = 0, **changes: Any) -> "VisionOracle":
    """Write a tiny Qwen2-VL into a folder, as it was published. Return transformers with the same weights."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return _build_qwen(folder, seed, "qwen2_vl", vision, changes)


def _build_qwen(
    folder: Path, seed: int, model_type: str, vision: dict[str, Any], changes: dict[str, Any]
) -> "VisionOracle":
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_TOKENS})
    tokenizer.chat_template = TEMPLATE.replace("[IMG]", "".join(QWEN_TOKENS))
    text = {name: value for name, value in _TEXT.items() if name not in ("model_type", "head_dim", "sliding_window")}
    settings = {
        "model_type": model_type,
        "text_config": text
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 3e3, "mrope_section": [2, 3, 3]}},
        "vision_config": vision,
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    model = reference.build_model(reference.build_config(settings), seed)
    model.save_pretrained(folder)
    FAMILIES[model_type].convert(folder)
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 1024}, patch_size=4, temporal_patch_size=2, merge_size=2
    )
    images.save_pretrained(folder)
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return QwenOracle(model, images, tokenizer)


class VisionOracle:
    """transformers' model and image processor, each sequence alone, without a cache.

    The tokens of an image are as PixtralProcessor documents them; the class itself needs torchvision.
    """

    marker = "[IMG]"

    def __init__(self, model: Any, images: Any, tokenizer: Any) -> None:
        self._model, self._images, self._tokenizer = model, images, tokenizer

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        opened = [Image.open(BytesIO(data)).convert("RGB") for data in images]
        return dict(self._images(opened, return_tensors="pt", patch_size={"height": 8, "width": 8}))

    def token_ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return the tokens of a text that has a marker for each image."""
        before, *after = text.split("[IMG]")
        sizes = self.processed(images)["image_sizes"].tolist() if images else []
        for (height, width), following in zip(sizes, after, strict=True):
            rows = ["[IMG]" * (width // 8)] * (height // 8)
            before += "[IMG_BREAK]".join(rows) + "[IMG_END]" + following
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


class QwenOracle(VisionOracle):
    """The same of Qwen2.5-VL, whose tokens of an image Qwen2_5_VLProcessor documents."""

    marker = "".join(QWEN_TOKENS)

    def processed(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images."""
        opened = [Image.open(BytesIO(data)).convert("RGB") for data in images]
        return dict(self._images(opened, return_tensors="pt"))

    def token_ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return the tokens of a text that has a marker for each image."""
        before, *after = text.split(self.marker)
        grids = self.processed(images)["image_grid_thw"].tolist() if images else []
        for (_, height, width), following in zip(grids, after, strict=True):
            before += QWEN_TOKENS[0] + QWEN_TOKENS[1] * (height * width // 4) + QWEN_TOKENS[2] + following
        ids: list[int] = self._tokenizer.encode(before, add_special_tokens=False)
        return ids

    def inputs(self, token_ids: list[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """Return all inputs of the model."""
        kinds = [[int(token_id == self._model.config.image_token_id) for token_id in token_ids]]
        return super().inputs(token_ids, images) | {"mm_token_type_ids": torch.tensor(kinds)}
