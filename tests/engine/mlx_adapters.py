"""Tiny adapters as mlx-lm saves them, and transformers' model with the same change of its weights: the reference."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import torch
from mlx.utils import tree_flatten
from mlx_lm import lora
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config
from safetensors.torch import load_file

from scorepool.engine.model.checkpoint import load_weights
from tests.engine.adapters import base_model
from tests.engine.oracle import Oracle


def save_mlx_adapter(
    base: Path, folder: Path, seed: int, kind: str = "lora", num_layers: int = -1, **parameters: Any
) -> Path:
    """Save an adapter with random weights, as mlx-lm's training does: the same layers, the same files."""
    mx.random.seed(seed)
    model, _ = load_weights(base, "float32")
    model.freeze()
    parameters = {"rank": 8, "dropout": 0.0, "scale": 2.0} | parameters
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    tensors: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    for name, tensor in tensors.items():
        if name.endswith(".lora_b"):
            tensors[name] = 0.05 * mx.random.normal(tensor.shape)
        elif name.endswith(".m"):
            tensors[name] = tensor * (1 + 0.2 * mx.random.uniform(shape=tensor.shape))
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    settings = lora.CONFIG_DEFAULTS | {"model": str(base), "fine_tune_type": kind, "num_layers": num_layers}
    save_config(settings | {"lora_parameters": parameters}, folder / "adapter_config.json")
    return folder


def train_mlx_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Train an adapter with mlx-lm for a few steps of a high learning rate."""
    data = folder / "data"
    data.mkdir(parents=True)
    for name in ("train", "valid"):
        lines = [json.dumps({"text": f"{word} " * 12}) for word in ("one", "two", "three", "four")]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    settings = {"model": str(base), "train": True, "data": str(data), "adapter_path": str(folder), "num_layers": -1}
    sizes = {"iters": 4, "batch_size": 2, "val_batches": 1, "learning_rate": 0.02, "max_seq_length": 64}
    lora.run(SimpleNamespace(**lora.CONFIG_DEFAULTS | settings | sizes | options))
    return folder


def oracle_with_mlx(base: Path, adapter: Path, rename: Callable[[str], str] = str) -> Oracle:
    """Return transformers' model whose weights have the adapter's change. `rename` maps mlx-lm's paths to its own."""
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapters.safetensors"),
    )
    model = base_model(base)
    for name in [name for name in tensors if name.endswith(".lora_a")]:
        path = name.removesuffix(".lora_a")
        weight = model.get_submodule(rename(path)).weight
        change = config["lora_parameters"]["scale"] * (tensors[name].float() @ tensors[f"{path}.lora_b"].float()).T
        with torch.no_grad():
            weight += change
            if config["fine_tune_type"] == "dora":
                weight *= (tensors[f"{path}.m"].float() / weight.norm(dim=1))[:, None]
    return Oracle(model.eval())
