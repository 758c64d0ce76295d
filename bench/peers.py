"""The systems that are compared: scorepool's engine and what people use in its place. All compute in float32.

Every peer runs as its own users run it, on token ids, with every saving that it offers: no padding if rows run alone,
no attention mask if pads come last, and the head on completion tokens only if there is a switch for it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import torch
from mlx.nn.layers.activations import log_softmax
from transformers import AutoModelForCausalLM

from bench.compare import Item, Scores
from scorepool.engine import Engine, EngineSettings, Sequence
from scorepool.engine.model.device import gpu_kind

_TORCH_DEVICES = {None: "cpu", "metal": "mps", "cuda": "cuda"}  # what torch calls the device that MLX computes on


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineSettings(model=str(folder), dtype="float32", **settings))


def load_mlx(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer as mlx-lm's users do, and cast the model to float32."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


def to_sequence(item: Item) -> Sequence:
    return Sequence(token_ids=item.prompt + item.completion, score_from=len(item.prompt))


@dataclass(frozen=True, slots=True)
class ScorepoolEngine:
    engine: Engine

    def __call__(self, items: list[Item]) -> Scores:
        sequences = self.engine.add([to_sequence(item) for item in items]).result()
        return [[value for value in sequence.columns.logprobs if value is not None] for sequence in sequences]


@dataclass(frozen=True, slots=True)
class FullLogits:
    """The direct way in MLX: logits of every token, normalised in float32."""

    model: Any
    rows_at_once: int

    def __call__(self, items: list[Item]) -> Scores:
        scores: Scores = []
        for start in range(0, len(items), self.rows_at_once):
            batch = items[start : start + self.rows_at_once]
            token_ids = mx.array(_padded(batch))
            logprobs = log_softmax(self.model(token_ids[:, :-1]).astype(mx.float32))
            chosen: Any = mx.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)[..., 0].tolist()
            scores += [_of_completion(item, values) for item, values in zip(batch, chosen, strict=True)]
        return scores


@dataclass(frozen=True, slots=True)
class Transformers:
    """transformers on torch; `logits_to_keep` saves the head of the prompt."""

    model: Any
    rows_at_once: int

    @classmethod
    def load(cls, folder: Path, rows_at_once: int) -> "Transformers":
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in eval mode
        return cls(model.to(_TORCH_DEVICES[gpu_kind()]), rows_at_once)

    def __call__(self, items: list[Item]) -> Scores:
        scores: Scores = []
        for start in range(0, len(items), self.rows_at_once):
            batch = items[start : start + self.rows_at_once]
            token_ids = torch.tensor(_padded(batch), device=self.model.device)
            first = min(len(item.prompt) for item in batch) - 1  # predicts the first completion token of any row
            keep = token_ids.shape[1] - 1 - first
            with torch.no_grad():
                logits = self.model(token_ids[:, :-1], use_cache=False, logits_to_keep=keep).logits.float()
                logprobs = torch.log_softmax(logits, dim=-1)
                chosen = logprobs.gather(-1, token_ids[:, first + 1 :, None])[..., 0].tolist()
            scores += [_of_completion(item, [0.0] * first + values) for item, values in zip(batch, chosen, strict=True)]
        return scores


class Evaluate:
    """mlx_lm.evaluate's `MLXLM.loglikelihood`: runs a prompt once, then its completions one by one. Reports sums."""

    def __init__(self, model: Any) -> None:
        self._lm = _make_mlxlm()
        self._lm._model, self._lm.tokenizer = model, _TokenIdTokenizer()
        self._lm.use_chat_template, self._lm._max_tokens = False, None

    def __call__(self, items: list[Item]) -> Scores:
        requests = [_Request((tuple(item.prompt), tuple(item.completion))) for item in items]
        return [[logprob] for logprob, _ in self._lm.loglikelihood(requests)]


@dataclass(frozen=True, slots=True)
class _Request:
    """The part of lm_eval's Instance that is read. Tuples of ids can be added and hashed like its texts."""

    args: tuple[tuple[int, ...], tuple[int, ...]]


class _TokenIdTokenizer:
    """A tokenizer whose texts are token ids already."""

    def encode(self, token_ids: tuple[int, ...], add_special_tokens: bool) -> tuple[int, ...]:
        return token_ids


def _make_mlxlm() -> Any:
    """Make an MLXLM without a model. It uses only a base class and a decorator of lm_eval, which is not installed."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        sys.modules[name] = ModuleType(name)
    sys.modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    sys.modules["lm_eval.api.registry"].register_model = lambda _: lambda kind: kind  # type: ignore[attr-defined]
    from mlx_lm.evaluate import MLXLM  # here: it needs the modules above

    return MLXLM.__new__(MLXLM)


def _padded(items: list[Item]) -> list[list[int]]:
    """Return [rows, longest]; pads come last, where no token of a causal model sees them."""
    longest = max(len(item.prompt) + len(item.completion) for item in items)
    return [item.prompt + item.completion + [0] * (longest - len(item.prompt) - len(item.completion)) for item in items]


def _of_completion(item: Item, values: list[float]) -> list[float]:
    """Select the completion's values; values[t] belongs to token t + 1."""
    first = len(item.prompt) - 1
    return values[first : first + len(item.completion)]
