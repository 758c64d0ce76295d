"""The reference: transformers on torch, each row alone, without a cache, normalised in float64."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from scorepool.engine.errors import describe
from scorepool.engine.model.dequantize import dequantized_weights
from scorepool.worker.certify.measure import Computed

POSITIONS_AT_ONCE = 64  # whose logits are cast to float64

logging.set_verbosity_error()
logging.disable_progress_bar()


class CannotCompare(Exception):
    """transformers cannot compute the model. The message says why."""


class Reference:
    """transformers' model of a checkpoint."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Load the checkpoint; raise CannotCompare if transformers cannot."""
        config = json.loads((folder / "config.json").read_text())
        try:
            open_ = _open_quantized if config.get("quantization") else _open
            self._model = open_(folder, getattr(torch, dtype)).eval()
        except CannotCompare:
            raise
        except Exception as error:  # any: each architecture fails in its own way
            raise CannotCompare(f"transformers cannot load {folder}: {describe(error)}") from error

    @property
    def num_layers(self) -> int:
        """The number of hidden layers."""
        return int(self._model.config.get_text_config().num_hidden_layers)

    def logprobs(self, rows: Iterable[Computed]) -> list[np.ndarray]:
        """Return [n, 1 + NUM_TOP] float64 logprobs of the wanted tokens of each row. Raises CannotCompare."""
        try:
            return [self._row(row.token_ids, row.wanted_ids) for row in rows]
        except Exception as error:  # any, as in loading
            raise CannotCompare(f"transformers cannot compute the model: {describe(error)}") from error

    def _row(self, token_ids: list[int], wanted_ids: np.ndarray) -> np.ndarray:
        wanted = torch.from_numpy(wanted_ids)
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
            predictors = logits[len(token_ids) - 1 - len(wanted) : -1]
            pieces = zip(predictors.split(POSITIONS_AT_ONCE), wanted.split(POSITIONS_AT_ONCE), strict=True)
            found = [torch.log_softmax(piece.double(), dim=-1).gather(1, ids) for piece, ids in pieces]
        return torch.cat(found).numpy()


def _open(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    )


def _open_quantized(folder: Path, dtype: torch.dtype) -> Any:
    """Give transformers the weights that MLX's quantised ones stand for. It cannot read MLX's format."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    missing = {name for name, _ in model.named_parameters()}  # tied weights have one of their names
    with torch.no_grad():
        for name, weight in dequantized_weights(folder):
            if name not in weights or tuple(weight.shape) != tuple(weights[name].shape):
                raise CannotCompare(f"transformers has no weight {name} of shape {tuple(weight.shape)} for {folder}")
            weights[name].copy_(torch.from_numpy(np.array(weight)))
            missing.discard(name)
    if missing:
        raise CannotCompare(f"{folder} has no weight {min(missing)}, which transformers expects")
    return model


def reference_versions() -> dict[str, str]:
    """Return the versions of what computes the reference."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
