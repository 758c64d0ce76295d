"""Images in the tokens of sequences. Knows no MLX and decodes nothing: see vision/.

A text that shows an image holds the model's marker once. Its tokens are then expanded: where the marker's token stands,
the tokens of the image stand, as many as the model makes of it.

    text    Look: [IMG]!    ──tokenizer──►   Look: # !    ──expand──►   Look: # # / # # / !
"""

import hashlib
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
    grid: tuple[int, int] = (0, 0)  # rows and columns of its features


class ImageCodec(Protocol):
    """What a model makes of images. Safe from any thread."""

    family: str
    marker: str  # what a text holds in the place of an image
    marker_id: int  # the token that stands for it

    def image_tokens(self, data: bytes) -> tuple[list[int], tuple[int, int]]:
        """Return the tokens that stand for an image, and the rows and columns of its features.

        Raises InvalidRequest for one that cannot be decoded.
        """


def digest_of(data: bytes) -> str:
    """Return a digest of an image's file."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def expand(
    codec: ImageCodec, token_ids: Sequence[int], images: Sequence[bytes]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Put the tokens of images where the markers' tokens are. Raises InvalidRequest; ValueError for other counts."""
    if token_ids.count(codec.marker_id) != len(images):
        raise ValueError(f"{token_ids.count(codec.marker_id)} markers for {len(images)} images")
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    for token_id in token_ids:
        if token_id != codec.marker_id:
            expanded.append(token_id)
            continue
        data = images[len(placed)]
        start = len(expanded)
        tokens, grid = codec.image_tokens(data)
        expanded += tokens
        placed.append(PlacedImage(digest_of(data), data, start, len(expanded), grid))
    return expanded, tuple(placed)
