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

from survey import reference
from tests.tiny_tokenizer import build_tokenizer

IMAGE_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
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


class VisionOracle:
    """transformers' model and image processor, each sequence alone, without a cache.

    The tokens of an image are as PixtralProcessor documents them; the class itself needs torchvision.
    """

    def __init__(self, model: torch.nn.Module, images: Any, tokenizer: Any) -> None:
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
        given = self.processed(images) if images else {}
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([token_ids]), use_cache=False, **given).logits[0].double()
        return torch.log_softmax(logits, dim=-1).numpy()
