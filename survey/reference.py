"""The reference: tiny models with drawn weights in transformers on torch, alone, without a cache, in float32."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from survey.mutations import Config

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)  # more threads are slower for tiny models


def build_config(settings: Config) -> Any:
    """Return transformers' configuration object: it checks the settings and adds its defaults. Raises many kinds."""
    config = AutoConfig.for_model(**settings)
    config._attn_implementation = "eager"
    return config


def build_model(config: Any, seed: int) -> Any:
    """Return a model with drawn weights: peaked distributions, routers with clear margins, no neutral vector.

    A model type of texts and images has both parts, as in its checkpoints; text alone is computed.
    """
    torch.manual_seed(seed)
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *_router_biases(model)]:
            _draw(name, weight)
    return model


def _router_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]


def _draw(name: str, weight: torch.Tensor) -> None:
    if any(key in name for key in ("embed", "lm_head", "wte", "wpe")) and weight.ndim == 2:
        weight.normal_(0, 0.3)
    elif "sinks" in name:
        weight.normal_(0, 1)
    elif name.endswith("dt_bias"):
        weight.uniform_(-9, 1)  # a state-space model's time steps: some below any limit, some above
    elif weight.ndim == 2 and ("router" in name or name.endswith("gate.weight")):
        weight.normal_(0, 0.3)
    elif weight.ndim >= 2:
        weight.normal_(0, 0.08)
    elif weight.is_floating_point():
        weight.add_(0.1 * torch.randn_like(weight))


def logprobs(model: Any, token_ids: list[int]) -> np.ndarray:
    """Return [length, vocab] in float64: row t is the distribution of token t + 1."""
    with torch.no_grad():
        model(torch.tensor([token_ids[:1]]), use_cache=False)  # a short row ends the dynamic scaling of a longer one
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def other_roundings(model: Any, rows: list[list[int]]) -> Iterator[list[np.ndarray]]:
    """Yield the rows' logprobs with weights that differ by rounding.

    Where these differ by nats, the model chooses an expert or a key among equals, and no computation is the right one.
    """
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(0)
    for _ in range(4):
        changed = {
            name: weight * (1 + 1e-6 * torch.randn_like(weight)) if weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
        model.load_state_dict(changed)
        yield [logprobs(model, row) for row in rows]
    model.load_state_dict(weights)


def has_same_weights(model: Any, other: Any) -> bool:
    """Give `model` the weights of `other`; False if their shapes differ."""
    ours, theirs = model.state_dict(), other.state_dict()
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return False
    model.load_state_dict(theirs)
    return True
