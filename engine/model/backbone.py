"""Split a model: hidden states of every position first, then logits of only the rows that are asked for.

The head over a whole prompt would be [tokens, vocab]: 5 GiB for 8192 tokens and Qwen's vocabulary. mlx-lm's models have
no switch for it, so the backbone (`model.model` or the like) gets a subclass. Its call either captures the output or
returns rows that this module put there. The architecture's own `Model.__call__` then does what it does to hidden
states: head, softcap, scaling. While hidden states are captured, the head is built lazily and never computed.
"""

import logging
import threading
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.sequence import Sequence

log = logging.getLogger(__name__)

# Where mlx-lm's architectures keep the backbone.
_PATHS = (
    "model",
    "backbone",
    "transformer",
    "language_model.model",
    "language_model.backbone",
    "language_model.transformer",
    "model.language_model",
    "gpt_neox",
)


class BackboneAndHead(Protocol):
    """A model split in two.

    backbone  token ids [rows, length] to hidden states [rows, length, width]
    head      hidden states [n, width] to logits [n, vocab]

    `sequences` are those of the rows, whose adapters compute them; None: the base model computes all rows. `starts` are
    the positions of the rows' first tokens if these are given ones, among which images may be: see image_backbone.py.
    """

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array: ...
    def compute_logits(self, rows: mx.array) -> mx.array: ...


class FullLogits:
    """A model whose backbone was not found: its hidden states are its logits. Correct, but needs more memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array:
        logits: mx.array = self._model(token_ids, cache=cache)
        return logits

    def compute_logits(self, rows: mx.array) -> mx.array:
        return rows


class KnownTokens:
    """A model that reads its last token in place of those that its embedding lacks.

    Models of one tokenizer may pad their embeddings differently, and MLX does not check that it reads a row of them.
    """

    def __init__(self, split: BackboneAndHead, vocab_size: int) -> None:
        """Take a model whose embedding has `vocab_size` rows."""
        self._split = split
        self._last_id = vocab_size - 1

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array:
        return self._split.forward_hidden(mx.minimum(token_ids, self._last_id), cache, sequences, starts)

    def compute_logits(self, rows: mx.array) -> mx.array:
        return self._split.compute_logits(rows)


class _Tapped(threading.local):
    """What a thread has captured, and what it injects."""

    injected: mx.array | None = None
    captured: mx.array | None = None


class BackboneTap:
    """A model whose backbone's output can be captured and replaced, by each thread for itself."""

    def __init__(self, model: Any, backbone: Module) -> None:
        self._model = model
        self._backbone = backbone
        self._own = own = _Tapped()
        kind = type(backbone)

        class TappedBackbone(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                if own.injected is not None:
                    return own.injected
                output = kind.__call__(self, *args, **kwargs)
                own.captured = output[0] if isinstance(output, tuple) else output
                return output

        self._kind = kind
        backbone.__class__ = TappedBackbone

    def remove(self) -> None:
        """Give the backbone its own class back."""
        self._backbone.__class__ = self._kind

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array:
        return self.forward(token_ids, cache)[0]

    def forward(self, token_ids: mx.array, cache: list[Any] | None = None) -> tuple[mx.array, mx.array]:
        """Return hidden states and logits [rows, length, vocab] of one forward pass; neither is computed yet."""
        logits: mx.array = self._model(token_ids, cache=cache)
        captured, self._own.captured = self._own.captured, None
        if captured is None:
            raise TypeError("the model did not call its tapped backbone")
        return captured, logits

    def compute_logits(self, rows: mx.array) -> mx.array:
        self._own.injected = rows[None]
        try:
            logits: mx.array = self._model(mx.zeros((1, rows.shape[0]), mx.int32))
        finally:
            self._own.injected = None
        return logits.squeeze(0)  # an index would copy the logits


def split_model(model: Any) -> BackboneAndHead:
    """Return a tap of the backbone that computes the model's own logits, or FullLogits if there is none."""
    for path in _PATHS:
        backbone = _find(model, path)
        if backbone is None:
            continue
        tap = BackboneTap(model, backbone)
        try:
            if _is_correct(tap):
                return tap
        except Exception as error:  # any: the architecture's own code on unusual input; try the next path
            log.debug("no tap at %s: %s: %s", path, type(error).__name__, error)
        tap.remove()
    log.warning("no backbone found in %s: logits are computed for every token", type(model).__module__)
    return FullLogits(model)


def _find(model: Any, path: str) -> Module | None:
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Module) else None


def _is_correct(tap: BackboneTap) -> bool:
    """True if the head alone computes the whole model's logits for two rows in the middle."""
    hidden, all_logits = tap.forward(mx.array([[0, 1, 2, 3]]))
    expected = all_logits[0, 1:3].astype(mx.float32)
    logits = tap.compute_logits(hidden[0, 1:3]).astype(mx.float32)
    if logits.shape != expected.shape:
        return False
    tolerance = 1e-2 * (1 + mx.abs(mx.where(mx.isinf(expected), 0, expected)).max())
    is_near = mx.abs(logits - expected) <= tolerance
    return bool(((logits == expected) | is_near).all().item())  # the -inf of an excluded token equals -inf
