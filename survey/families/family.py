"""One model type: its tiny configurations, and how published checkpoints differ from what transformers saves."""

from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True)
class Family:
    """One model type."""

    model_type: str
    settings: Config = field(default_factory=dict)  # beside SHAPE
    others: dict[str, Config] = field(default_factory=dict)  # further bases, by name: what they change

    def bases(self) -> dict[str, Config]:
        """Return the base configurations by name."""
        first = {"model_type": self.model_type, **SHAPE, **self.settings}
        return {"base": first} | {name: first | changed for name, changed in self.others.items()}

    def published(self, settings: Config) -> Config:
        """Return settings that published checkpoints write in another form than transformers 5 does."""
        return {key: settings[key] for key in ("layer_types",) if key in settings and self.model_type in ("lfm2",)}

    def convert(self, folder: Path) -> None:
        """Bring the weights into the layout of published checkpoints, where transformers saves another."""
