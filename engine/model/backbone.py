"""The model in two halves: hidden states of every position, then logits of only the rows that are asked for.

A head over a whole prompt would be [tokens, vocab]: 5 GiB for 8192 tokens and Qwen's vocabulary. mlx-lm's
models have no switch for it, so the backbone (`model.model` or the like) gets a subclass whose call either
notes its output or, for the head, returns rows that we put there. The architecture's own `Model.__call__`
then does what it does to hidden states: head, softcap, scaling. While hidden states are noted the head is
built lazily and never computed.
"""

import logging
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

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
    """Token ids [rows, length] to hidden states [rows, length, width]; those [n, width] to logits [n, vocab]."""

    def forward_hidden(self, token_ids: mx.array, cache: list[Any] | None = None) -> mx.array: ...
    def compute_logits(self, rows: mx.array) -> mx.array: ...


class FullLogits:
    """For a model without a backbone that we know: hidden states are logits. Right, and costs the memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward_hidden(self, token_ids: mx.array, cache: list[Any] | None = None) -> mx.array:
        logits: mx.array = self._model(token_ids, cache=cache)
        return logits

    def compute_logits(self, rows: mx.array) -> mx.array:
        return rows


class BackboneTap:
    """Not for two threads at once, like the model."""

    def __init__(self, model: Any, backbone: Module) -> None:
        self._model = model
        self._backbone = backbone
        self._inject: mx.array | None = None
        self._noted: mx.array | None = None
        tap, kind = self, type(backbone)

        class Tapped(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                if tap._inject is not None:
                    return tap._inject
                output = kind.__call__(self, *args, **kwargs)
                tap._noted = output[0] if isinstance(output, tuple) else output
                return output

        self._kind = kind
        backbone.__class__ = Tapped

    def remove(self) -> None:
        self._backbone.__class__ = self._kind

    def forward_hidden(self, token_ids: mx.array, cache: list[Any] | None = None) -> mx.array:
        self._model(token_ids, cache=cache)
        noted, self._noted = self._noted, None
        if noted is None:
            raise TypeError("the model did not call the backbone that is tapped")
        return noted

    def compute_logits(self, rows: mx.array) -> mx.array:
        self._inject = rows[None]
        try:
            logits: mx.array = self._model(mx.zeros((1, rows.shape[0]), mx.int32))
        finally:
            self._inject = None
        return logits.squeeze(0)  # an index would copy them


def split_model(model: Any) -> BackboneAndHead:
    """A verified Tap, else FullLogits."""
    for path in _PATHS:
        backbone = _find(model, path)
        if backbone is None:
            continue
        tap = BackboneTap(model, backbone)
        try:
            if _is_right(tap, model):
                return tap
        except Exception as error:  # any: the architecture's own code, fed by us; the next path or FullLogits serves
            log.debug("no tap at %s: %s: %s", path, type(error).__name__, error)
        tap.remove()
    log.warning("no backbone found in %s: logits are computed for every token", type(model).__module__)
    return FullLogits(model)


def _find(model: Any, path: str) -> Module | None:
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Module) else None


def _is_right(tap: BackboneTap, model: Any) -> bool:
    """Logits of two rows in the middle, by the head alone, are those of the whole model."""
    token_ids = mx.array([[0, 1, 2, 3]])
    whole = model(token_ids)[0, 1:3].astype(mx.float32)
    rows = tap.forward_hidden(token_ids)[0, 1:3]
    logits = tap.compute_logits(rows).astype(mx.float32)
    if logits.shape != whole.shape:
        return False
    tolerance = 1e-2 * (1 + mx.abs(mx.where(mx.isinf(whole), 0, whole)).max())
    is_near = mx.abs(logits - whole) <= tolerance
    return bool(((logits == whole) | is_near).all().item())  # -inf, where the model excludes a token, equals -inf
