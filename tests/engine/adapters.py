"""Tiny adapters that peft saves, and peft's model with them: the reference."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.engine.oracle import Oracle
from tests.tiny_models import ORACLE_FOLDER

ALL_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(folder: Path) -> Any:
    folder = folder / ORACLE_FOLDER if (folder / ORACLE_FOLDER).exists() else folder
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def save_adapter(base: Path, folder: Path, seed: int, **settings: Any) -> Path:
    """Save an adapter with random weights for the model in `base`, large enough to change logprobs by nats."""
    torch.manual_seed(seed)
    config = LoraConfig(**({"r": 8, "lora_alpha": 16, "target_modules": ALL_LAYERS} | settings))
    with _without_warnings():
        model = get_peft_model(base_model(base), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
            elif "magnitude" in name:
                weight.mul_(1 + 0.2 * torch.rand_like(weight))
    with _without_warnings():
        model.save_pretrained(str(folder))
    return folder


def oracle_with(base: Path, adapter: Path) -> Oracle:
    """Return peft's model of the base with the adapter."""
    with _without_warnings():
        return Oracle(PeftModel.from_pretrained(base_model(base), str(adapter)).eval())


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore what peft does that transformers deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
