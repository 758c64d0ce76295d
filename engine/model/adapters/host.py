"""Load and drop the adapters of a model. Must be used on the MLX thread."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scorepool.engine.adapter import Adapter, describe_excess
from scorepool.engine.errors import AdapterError
from scorepool.engine.model import checkpoint, mtp_layouts
from scorepool.engine.model.adapters.bank import AdapterBank
from scorepool.engine.model.adapters.load import read_adapter
from scorepool.engine.model.adapters.placement import place
from scorepool.engine.model.config import Config


class AdapterHost:
    """The adapters of one model."""

    def __init__(self, bank: AdapterBank, model: Any, folder: Path, config: Config) -> None:
        """Start without adapters. `folder` has the base checkpoint's tensors, and `config` is its configuration."""
        self._bank = bank
        self._model = model
        self._folder = folder
        self._config = config

    @property
    def num_bytes(self) -> int:
        """The memory that all adapters take."""
        return self._bank.num_bytes

    def load(self, name: str, folder: str, max_bytes: int) -> Adapter:
        """Load and test an adapter, if all of them take at most `max_bytes` with it.

        Raises AdapterError; then nothing has changed.
        """
        stored = checkpoint.stored_tensors(self._folder)
        if not stored:
            raise AdapterError(
                f"the weights that serve now are gone from {self._folder}, expected them there: an adapter is compared "
                "with them"
            )
        for head_tensor in mtp_layouts.head_tensors(self._config, list(stored)):
            del stored[head_tensor]  # transformers does not load them, so peft does not adapt them
        weights = read_adapter(folder, stored, self._model, max_bytes)
        terms = place(weights, self._model, stored)
        if (num_bytes := self._bank.num_bytes_with(terms)) > max_bytes:
            raise AdapterError(describe_excess(num_bytes, max_bytes))
        adapter = Adapter(name, weights.fingerprint, folder, weights.rank, weights.kind)
        self._bank.add(adapter, terms)
        return adapter

    def drop(self, adapters: Iterable[Adapter]) -> None:
        """Free the slots of adapters that no sequence has."""
        for adapter in adapters:
            self._bank.remove(adapter)

    def take_over(self, other: "AdapterHost") -> None:
        """Take the adapters of a closed host of the same architecture."""
        self._bank.take_over(other._bank)

    def close(self) -> None:
        """Let go of the model."""
        self._bank.close()
        del self._model
