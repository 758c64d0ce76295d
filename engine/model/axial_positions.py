"""Rotate queries and keys by positions on three axes: those of images in a text (M-RoPE).

Text counts on all axes alike. An image stands at one time, and its features at their rows and columns, counted from
that time on; the text after it goes on after the last row or column:

    token     a  b  # # # #  c        # # # # are two rows of two
    time      0  1  2 2 2 2  4
    row       0  1  2 2 3 3  4
    column    0  1  2 3 2 3  4

A video has several times, each with the same rows and columns; the text after it goes on after the last of all three.

So later tokens stand at other positions than their number in the sequence: a shift. Each axis has its own part of the
frequencies of a head. The rotation of an axis is the model's own, at other positions, and where all axes agree it is
the model's.
"""

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from scorepool.engine.errors import LoadError
from scorepool.engine.images import PlacedImage
from scorepool.engine.sequence import Sequence

_AXES = 3


def positions(sequence: Sequence, start: int, length: int) -> "np.ndarray[Any, Any]":
    """Return [3, length]: the positions of the tokens from `start` on."""
    pieces: list[np.ndarray[Any, Any]] = []
    index = at = 0  # in the sequence; on the axes
    for image in sequence.images:
        pieces.append(_text(at, image.start - index))
        at += image.start - index
        rows, columns = image.grid
        grid = np.indices((len(image.times), rows, columns)).reshape(_AXES, -1)
        grid[0] = np.array(image.times)[grid[0]]
        pieces.append(grid[:, : image.end - image.start] + at)
        at += image.extent
        index = image.end
    pieces.append(_text(at, max(0, start + length - index)))
    return np.concatenate(pieces, axis=1)[:, start : start + length]


def shift(images: Items[PlacedImage]) -> int:
    """Return what is added to the number of a token after the images."""
    return sum(image.extent - (image.end - image.start) for image in images)


def _text(at: int, length: int) -> "np.ndarray[Any, Any]":
    return np.broadcast_to(np.arange(at, at + length), (_AXES, length))


class AxialPositions:
    """The rotations of a model, which can be told other positions. Not thread-safe, like the model."""

    def __init__(self, model: Module, axes: Items[int]) -> None:
        """Tap the model's rotations; `axes` has the axis of each frequency. Raises LoadError."""
        self._positions: mx.array | None = None  # [3, rows, length]
        self._shifts: mx.array | None = None  # [rows]
        self._axis = mx.array([*axes, *axes])  # of each dimension of a head: two have one frequency
        found = [module for name, module in model.named_modules() if name.endswith("self_attn.rope")]
        if not found:
            raise LoadError("the model has no rotations, and its images have positions on several axes")
        for module in found:
            self._tap(module)

    def place(self, sequences: Items[Sequence], starts: Items[int], length: int) -> None:
        """Rotate rows of given tokens from their starts on, until `clear`."""
        rows = [positions(sequence, start, length) for sequence, start in zip(sequences, starts, strict=True)]
        self._positions = mx.array(np.stack(rows, axis=1))

    def shift(self, sequences: Items[Sequence]) -> None:
        """Rotate the next tokens of rows, until `clear`."""
        self._shifts = mx.array([shift(sequence.images) for sequence in sequences])

    def clear(self) -> None:
        """Rotate by the numbers of tokens again."""
        self._positions = self._shifts = None

    def _tap(self, module: Module) -> None:
        tap, kind = self, type(module)

        class TappedRotation(kind):  # type: ignore[misc, valid-type]
            def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
                if tap._positions is not None:
                    return tap._rotate(lambda flat, at: kind.__call__(self, flat, offset=at), x)
                if tap._shifts is not None:
                    offset = offset + tap._shifts
                rotated: mx.array = kind.__call__(self, x, offset=offset)
                return rotated

        module.__class__ = TappedRotation

    def _rotate(self, rotate: Any, x: mx.array) -> mx.array:
        """Rotate [rows, heads, length, width], each token as a row of its own."""
        assert self._positions is not None
        rows, heads, length, width = x.shape
        if width < self._axis.size:
            raise ValueError(f"a head has {width} dimensions, and images have axes for {self._axis.size}")
        axis = mx.pad(self._axis, (0, width - self._axis.size))  # the last dimensions may have no positions
        flat = x.transpose(0, 2, 1, 3).reshape(rows * length, heads, 1, width)
        time, row, column = (rotate(flat, self._positions[axis].reshape(-1)) for axis in range(_AXES))
        rotated = mx.where(axis == 0, time, mx.where(axis == 1, row, column))
        return rotated.reshape(rows, length, heads, width).transpose(0, 2, 1, 3)
