"""Who runs in a race: our engine, and what people use in its place. All compute in float32.

Every peer is run as its own users run it, on token ids, and none is given less than it can use: no padding where rows
go alone, no attention mask where pads come last, and the head on completion rows alone where there is a switch for it.
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

from bench.race import Row, Scores
from scorepool.engine import Engine, EngineSettings, Sequence


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineSettings(model=str(folder), dtype="float32", **settings))


def load_mlx(folder: Path) -> tuple[Any, Any]:
    """What mlx-lm's users call, and the cast."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@dataclass(frozen=True, slots=True)
class Ours:
    engine: Engine

    def __call__(self, rows: list[Row]) -> Scores:
        sequences = [Sequence(token_ids=row.prompt + row.completion, score_from=len(row.prompt)) for row in rows]
        return [
            [value for value in done.columns.logprobs if value is not None]
            for done in self.engine.add(sequences).result()
        ]


@dataclass(frozen=True, slots=True)
class FullLogits:
    """The plain way in MLX: logits of every token, normalised in float32."""

    model: Any
    rows_at_once: int

    def __call__(self, rows: list[Row]) -> Scores:
        scores: Scores = []
        for start in range(0, len(rows), self.rows_at_once):
            part = rows[start : start + self.rows_at_once]
            token_ids = mx.array(_padded(part))
            logprobs = log_softmax(self.model(token_ids[:, :-1]).astype(mx.float32))
            chosen: Any = mx.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)[..., 0].tolist()
            scores += [_completion(row, values) for row, values in zip(part, chosen, strict=True)]
        return scores


@dataclass(frozen=True, slots=True)
class Transformers:
    """`logits_to_keep` spares the head of the prompt."""

    model: Any
    rows_at_once: int

    @classmethod
    def load(cls, folder: Path, rows_at_once: int) -> "Transformers":
        return cls(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rows_at_once
        )  # in eval mode already

    def __call__(self, rows: list[Row]) -> Scores:
        scores: Scores = []
        for start in range(0, len(rows), self.rows_at_once):
            part = rows[start : start + self.rows_at_once]
            token_ids = torch.tensor(_padded(part))
            first = min(len(row.prompt) for row in part) - 1  # predicts the first completion token of any row
            keep = token_ids.shape[1] - 1 - first
            with torch.no_grad():
                logits = self.model(token_ids[:, :-1], use_cache=False, logits_to_keep=keep).logits.float()
                logprobs = torch.log_softmax(logits, dim=-1)
                chosen = logprobs.gather(-1, token_ids[:, first + 1 :, None])[..., 0].tolist()
            scores += [_completion(row, [0.0] * first + values) for row, values in zip(part, chosen, strict=True)]
        return scores


class Evaluate:
    """mlx_lm.evaluate's own `MLXLM.loglikelihood`: a prompt once, then its completions one by one. Gives sums."""

    def __init__(self, model: Any) -> None:
        self._lm = _mlxlm()
        self._lm._model, self._lm.tokenizer = model, _Identity()
        self._lm.use_chat_template, self._lm._max_tokens = False, None

    def __call__(self, rows: list[Row]) -> Scores:
        found = self._lm.loglikelihood([_Request((tuple(row.prompt), tuple(row.completion))) for row in rows])
        return [[logprob] for logprob, _ in found]


@dataclass(frozen=True, slots=True)
class _Request:
    """lm_eval's Instance, as far as it is read. Tuples of ids add and hash as its texts do."""

    args: tuple[tuple[int, ...], tuple[int, ...]]


class _Identity:
    """Token ids stand for themselves."""

    def encode(self, token_ids: tuple[int, ...], add_special_tokens: bool) -> tuple[int, ...]:
        return token_ids


def _mlxlm() -> Any:
    """An MLXLM without a model. lm_eval, whose base class and decorator are all that it uses, is not installed."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        sys.modules[name] = ModuleType(name)
    sys.modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    sys.modules["lm_eval.api.registry"].register_model = lambda _: lambda kind: kind  # type: ignore[attr-defined]
    from mlx_lm.evaluate import MLXLM  # here: it needs the modules above

    return MLXLM.__new__(MLXLM)


def _padded(rows: list[Row]) -> list[list[int]]:
    """[rows, longest]; pads come last, where no causal model's token sees them."""
    longest = max(len(row.prompt) + len(row.completion) for row in rows)
    return [row.prompt + row.completion + [0] * (longest - len(row.prompt) - len(row.completion)) for row in rows]


def _completion(row: Row, values: list[float]) -> list[float]:
    """Of values[t], which belongs to token t + 1."""
    first = len(row.prompt) - 1
    return values[first : first + len(row.completion)]
