"""One model type: its tiny configurations, and how published checkpoints differ from what transformers saves."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from survey.mutations import Config

VOCAB_SIZE = 512
SHAPE: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One model type."""

    model_type: str
    settings: Config = field(default_factory=dict)  # beside `shape`
    others: dict[str, Config] = field(default_factory=dict)  # further bases, by name: what they change
    shape: Config = field(default_factory=lambda: SHAPE)
    section: str = ""  # where all these settings are, e.g. "text_config"; "" is the top level
    outer: Config = field(default_factory=dict)  # settings beside the section, e.g. a tiny vision_config
    prefix: str = ""  # of the settings' names, if `publish` puts them into a section
    publish: Callable[[Config, Weights], None] | None = None
    """Bring what transformers saved into the form of published checkpoints, in place."""

    def bases(self) -> dict[str, Config]:
        """Return the base configurations by name."""
        shape = {**self.shape, **self.settings}
        return {"base": self._placed(shape)} | {
            name: self._placed(shape | changed) for name, changed in self.others.items()
        }

    def _placed(self, settings: Config) -> Config:
        placed = {self.section: settings} if self.section else settings
        return {"model_type": self.model_type, **self.outer, **placed}

    def convert(self, folder: Path) -> None:
        """Apply `publish` to the checkpoint."""
        if self.publish is None:
            return
        config_path, weights_path = folder / "config.json", folder / "model.safetensors"
        config, weights = json.loads(config_path.read_text()), load_file(weights_path)
        self.publish(config, weights)
        config_path.write_text(json.dumps(config))
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, weights_path, metadata={"format": "pt"})


def rename(weights: Weights, names: dict[str, str]) -> None:
    """Replace the first part of each weight's name that matches a pattern, for every pattern in turn."""
    for name in list(weights):
        published = name
        for pattern, replacement in names.items():
            published = re.sub(pattern, replacement, published, count=1)
        weights[published] = weights.pop(name)
