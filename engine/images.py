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
class Video:
    """Frames that a model sees as one video."""

    frames: tuple[bytes, ...]  # files of images, in their order
    fps: float  # frames of a second


@dataclass(frozen=True, slots=True)
class VideoFile:
    """An MP4 or WebM file, of which frames are sampled."""

    data: bytes
    fps: float  # sampled frames of a second


Shown = bytes | Video | VideoFile  # the file of an image, or a video


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image or a video in the tokens of a sequence."""

    digest: str  # of its bytes
    data: Shown
    start: int  # the position of its first token
    end: int  # the position after its last token
    grid: tuple[int, int] = (0, 0)  # rows and columns of its features
    attends_ahead: bool = False  # its tokens attend to each other, so they go through the model together
    times: tuple[int, ...] = (0,)  # of a video: the position of each of its grids in time
    num_frames: int = 0  # of a video

    @property
    def extent(self) -> int:
        """How far the text after it stands from its start, on the axes of M-RoPE."""
        return max(*self.grid, self.times[-1] + 1)


@dataclass(frozen=True, slots=True)
class Injection:
    """What images change in a language model, beside the embeddings of the tokens that stand for their features."""

    axes: tuple[int, ...] = ()  # for each frequency of a head: the axis by whose positions it rotates; see M-RoPE
    num_deep_layers: int = 0  # the first layers, to whose output further features of these tokens are added
    attends_ahead: bool = False  # the tokens of an image attend to those after them, too
    only_sliding_ahead: bool = False  # they do in sliding layers only
    layer_input_id: int | None = None  # the token whose inputs of each layer stand for those of these tokens


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """An image or a video, and the tokens that stand for it in a text."""

    digest: str  # of its bytes
    data: Shown
    token_ids: list[int]
    grid: tuple[int, int]  # rows and columns of its features
    times: tuple[int, ...] = (0,)
    num_frames: int = 0


class ImageCodec(Protocol):
    """What a model makes of images. Safe from any thread."""

    family: str
    marker: str  # what a text holds in the place of an image
    spelled_marker: str  # what stands there when the text is encoded: the marker, and the text around every image
    marker_id: int  # the marker's token
    video_marker: str | None  # the same of a video; None: the model takes none
    video_marker_id: int | None
    injection: Injection

    def tokens_of(self, data: Shown) -> ImageTokens:
        """Return the tokens that stand for an image or a video. Raises InvalidRequest for what cannot be decoded."""

    def frames_of(self, video: Video | VideoFile) -> Sequence[bytes]:
        """Return the frames of a video as files of images. Raises InvalidRequest."""


def digest_of(data: Shown) -> str:
    """Return a digest of an image's file, or of a video."""
    if isinstance(data, bytes):
        return hashlib.blake2b(data, digest_size=20).hexdigest()
    if isinstance(data, VideoFile):
        return hashlib.blake2b(f"file {data.fps!r} ".encode() + data.data, digest_size=20).hexdigest()
    digest = hashlib.blake2b(f"video {data.fps!r}".encode(), digest_size=20)
    for frame in data.frames:
        digest.update(len(frame).to_bytes(8, "big") + frame)
    return digest.hexdigest()


def num_positions(images: Sequence[PlacedImage], num_tokens: int) -> int:
    """Return how many positions a sequence takes on an axis of M-RoPE: the times of a video may need more than tokens.

    `num_tokens` are those of the sequence, images included. Other models count tokens, which are not fewer.
    """
    ahead = reached = 0
    for image in images:
        ahead += image.extent - (image.end - image.start)
        reached = max(reached, image.end + ahead)
    return max(reached, num_tokens + ahead)


def expand(
    codec: ImageCodec, token_ids: Sequence[int], images: Sequence[ImageTokens]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Put the tokens of images where the markers' tokens are. Raises ValueError if there are not as many, in order."""
    marker_ids = [token_id for token_id in token_ids if token_id in (codec.marker_id, codec.video_marker_id)]
    if len(marker_ids) != len(images):
        raise ValueError(f"{len(marker_ids)} markers for {len(images)} images")
    if marker_ids != [codec.video_marker_id if image.num_frames else codec.marker_id for image in images]:
        raise ValueError("markers of images and videos in another order")
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    attends_ahead = codec.injection.attends_ahead
    for token_id in token_ids:
        if token_id not in (codec.marker_id, codec.video_marker_id):
            expanded.append(token_id)
            continue
        image = images[len(placed)]
        start = len(expanded)
        expanded += image.token_ids
        end, shape = len(expanded), (image.times, image.num_frames)
        placed.append(PlacedImage(image.digest, image.data, start, end, image.grid, attends_ahead, *shape))
    return expanded, tuple(placed)
