"""Let the tokens of an image attend to those of the same image that come after them.

    a  # # #  b        a row attends to the columns that are marked
    x                  a
    x  x x x           #       the features of one image: all of a prompt's chunk, which never ends among them
    x  x x x           #
    x  x x x           #
    x  x x x  x        b

The keys of a forward pass's own tokens are the last ones of every kind of cache, so what is added to a mask does not
depend on the cache, nor on the window of a sliding layer.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from scorepool.engine.errors import LoadError
from scorepool.engine.model import kv_cache


class ImageAttention:
    """The attention of a model, which can be told the images of a forward pass. Not thread-safe, like the model."""

    def __init__(self, model: Module, *, only_sliding: bool = False) -> None:
        """Tap the model's attention, or that of its sliding layers. Raises LoadError."""
        self._ahead: mx.array | None = None  # [rows, 1, length, length]
        every: list[Any] = [module for name, module in model.named_modules() if name.endswith(".self_attn")]
        found = [module for module in every if module.is_sliding] if only_sliding else every
        if not found:
            raise LoadError("the model has no attention whose masks could be changed")
        for module in found:
            self._tap(module)

    def place(self, spans: list[tuple[int, list[int]]], num_rows: int, length: int) -> None:
        """Let the tokens of each span, a row and its columns, attend to all of the span, until `clear`."""
        if not spans:
            return
        ahead = np.zeros((num_rows, 1, length, length), dtype=bool)
        for row, columns in spans:
            ahead[row, 0, columns[0] : columns[-1] + 1, columns[0] : columns[-1] + 1] = True
        self._ahead = mx.array(np.triu(ahead, 1))

    def clear(self) -> None:
        """Let tokens attend to earlier ones only."""
        self._ahead = None

    def _tap(self, module: Module) -> None:
        tap, kind = self, type(module)

        class TappedAttention(kind):  # type: ignore[misc, valid-type]
            def __call__(self, hidden: mx.array, mask: Any = None, cache: Any = None, **others: Any) -> Any:
                if tap._ahead is not None:
                    mask = kv_cache.look_ahead(mask, cache, tap._ahead)
                return kind.__call__(self, hidden, mask, cache, **others)

        module.__class__ = TappedAttention
