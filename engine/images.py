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
    attends_ahead: bool = False  # its tokens attend to each other, so they go through the model together


@dataclass(frozen=True, slots=True)
class Injection:
    """What images change in a language model, beside the embeddings of the tokens that stand for their features."""

    axes: tuple[int, ...] = ()  # for each frequency of a head: the axis by whose positions it rotates; see M-RoPE
    num_deep_layers: int = 0  # the first layers, to whose output further features of these tokens are added
    attends_ahead: bool = False  # the tokens of an image attend to those after them, too


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """An image, and the tokens that stand for it in a text."""

    digest: str  # of its bytes
    data: bytes  # the file
    token_ids: list[int]
    grid: tuple[int, int]  # rows and columns of its features


class ImageCodec(Protocol):
    """What a model makes of images. Safe from any thread."""

    family: str
    marker: str  # what a text holds in the place of an image
    spelled_marker: str  # what stands there when the text is encoded: the marker, and the text around every image
    marker_id: int  # the marker's token
    injection: Injection

    def tokens_of(self, data: bytes) -> ImageTokens:
        """Return the tokens that stand for an image. Raises InvalidRequest for one that cannot be decoded."""


def digest_of(data: bytes) -> str:
    """Return a digest of an image's file."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def expand(
    codec: ImageCodec, token_ids: Sequence[int], images: Sequence[ImageTokens]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Put the tokens of images where the markers' tokens are. Raises ValueError if there are not as many."""
    if token_ids.count(codec.marker_id) != len(images):
        raise ValueError(f"{token_ids.count(codec.marker_id)} markers for {len(images)} images")
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    attends_ahead = codec.injection.attends_ahead
    for token_id in token_ids:
        if token_id != codec.marker_id:
            expanded.append(token_id)
            continue
        image = images[len(placed)]
        start = len(expanded)
        expanded += image.token_ids
        placed.append(PlacedImage(image.digest, image.data, start, len(expanded), image.grid, attends_ahead))
    return expanded, tuple(placed)
