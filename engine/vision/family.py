"""What a module of a family of vision-language models has: the classes `Images` and `Tower`.

The first lives as long as the model is served, and the second as long as its weights do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from PIL.Image import Image

from scorepool.engine.images import Injection


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the vision tower takes it, and the tokens that stand for it in a text."""

    arrays: dict[str, np.ndarray[Any, Any]]
    token_ids: list[int]
    grid: tuple[int, int]  # rows and columns of features
    times: tuple[int, ...] = (0,)  # of a video: the position of each of its grids in time
    num_frames: int = 0  # of a video

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about."""
        return sum(array.nbytes for array in self.arrays.values()) + 8 * len(self.token_ids)


class FamilyImages(Protocol):
    """A checkpoint's settings of images. Any thread; no MLX. Made of the folder, the configuration, the tokenizer."""

    name: str
    marker: str
    spelled_marker: str  # see ImageCodec
    marker_id: int
    feature_id: int  # the token that stands for a feature
    injection: Injection

    def process(self, image: Image) -> ProcessedImage:
        """Resize and normalise an image as the checkpoint's processor does."""


class FamilyVideos(Protocol):
    """A checkpoint's settings of videos: the attribute `videos` of the images of a family that takes some."""

    marker: str
    marker_id: int  # the marker's token, which stands for each feature too

    def process(self, frames: Iterable[Image], num_frames: int, fps: float) -> ProcessedImage:
        """Resize and normalise the frames of a video, decoded one after the other. Raises InvalidRequest."""


class FamilyTower(Protocol):
    """A checkpoint's vision tower. On the MLX thread. Made of the configuration, the stored tensors, the dtype."""

    module: Module  # its weights

    def encode(self, processed: ProcessedImage) -> mx.array:
        """Return the features [n, width] of an image, one for each `feature_id` of its tokens.

        Those of deep layers stand beside those of the embeddings: [n, (1 + num_deep_layers) * width].
        """
