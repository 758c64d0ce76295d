"""Turn images into tokens that stand for them in a text. Knows no MLX and decodes nothing itself: see ImageCodec.

A text that shows an image holds the model's marker once. Its tokens are then expanded: where the marker's token stands,
the tokens of the image stand, as many as the model makes of it.

    text    Look: [IMG]!    ──tokenizer──►   Look: # !    ──expand──►   Look: # # / # # / !
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in the tokens of a sequence."""

    digest: str  # of its bytes
    data: bytes  # the file
    start: int  # the position of its first token
    end: int  # the position after its last token


class ImageCodec(Protocol):
    """What a model makes of images. Safe from any thread."""

    family: str
    marker: str  # what a prompt holds in the place of an image

    def count_markers(self, text: str) -> int:
        """Return how many images a text shows, by its markers and those that a chat template has written."""

    def image_token_ids(self, data: bytes) -> list[int]:
        """Return the tokens that stand for an image. Raises InvalidRequest for one that cannot be decoded."""

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Put the tokens of images where the markers' tokens are. Raises InvalidRequest."""
