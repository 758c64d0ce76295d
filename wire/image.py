"""Define the images of a request, with the limits that hold everywhere. The server's own are settings."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from scorepool.wire.image_header import FORMATS, ImageHeader, read_header
from scorepool.wire.video_header import VIDEO_FORMATS, is_video_file

MAX_IMAGES = 64  # of one job
MAX_IMAGE_BYTES = 2**27
MAX_URL_LENGTH = 8192  # signed URLs are long
MAX_IMAGE_PIXELS = 2**26  # 200 MB when it is decoded
MIN_SIDE = 4  # pixels
MAX_RATIO = 200  # of the longer side to the shorter one
MAX_FRAMES = 768  # of a video
MAX_VIDEO_PIXELS = 2**28  # of the frames of a video together
MIN_FPS = 0.001  # a frame in a quarter of an hour
DEFAULT_FPS = 2.0  # at which Qwen's models were shown videos


class Image(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Show the model an image, or a video as frames."""

    data: Annotated[
        bytes,
        Meta(
            min_length=1,
            max_length=MAX_IMAGE_BYTES,
            description=f"A {FORMATS} file, in JSON as base64. Of an animation its first frame is shown. Or a video: "
            f"an {VIDEO_FORMATS} file, of which `fps` frames a second are shown.",
        ),
    ] = b""
    url: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_URL_LENGTH,
                description="URL of the file, in the place of `data`, if the operator lets the API fetch it.",
            ),
        ]
        | None
    ) = None
    frames: Annotated[
        list[Annotated[bytes, Meta(min_length=1, max_length=MAX_IMAGE_BYTES)]],
        Meta(
            max_length=MAX_FRAMES,
            description=f"The frames of a video in their order, in the place of `data`: {FORMATS} files of one size.",
        ),
    ] = []
    fps: (
        Annotated[
            float,
            Meta(ge=MIN_FPS, le=1000, description=f"Frames of a second of the video. null is {DEFAULT_FPS:g}."),
        ]
        | None
    ) = None
    at: Annotated[
        int, Meta(ge=0, le=8_000_000, description="The number of characters of the text that stand before it.")
    ] = 0

    def __post_init__(self) -> None:
        given = [name for name in ("data", "url", "frames") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(f"`{name}`" for name in given) or "none"
            raise ValueError(f"expected one of `data`, `url` and `frames`, found {found}")
        if self.fps is not None and not self.is_video:
            raise ValueError("`fps` needs `frames`, or a video in `data`")
        num_pixels = 0
        for index, file in enumerate(self.images):
            try:
                header = read_header(file)
                check_size(header)
            except ValueError as error:
                raise ValueError(f"`frames[{index}]`: {error}" if self.frames else str(error)) from None
            num_pixels += header.width * header.height
        if self.frames and num_pixels > MAX_VIDEO_PIXELS:
            raise ValueError(f"expected `frames` of at most {MAX_VIDEO_PIXELS} pixels together, found {num_pixels}")

    @property
    def is_video(self) -> bool:
        """True for frames, and for the file of a video."""
        return bool(self.frames) or is_video_file(self.data)

    @property
    def images(self) -> list[bytes]:
        """The image's file, or those of a video's frames; none of what is sampled or fetched later."""
        return self.frames or ([self.data] if self.data and not self.is_video else [])


Images = Annotated[
    list[Image],
    Meta(
        max_length=MAX_IMAGES,
        description="Images that the text shows, in its order. The model must take images: `images` of GET /v1/models.",
    ),
]


def check_size(header: ImageHeader, max_pixels: int = MAX_IMAGE_PIXELS, setting: str = "") -> None:
    """Check the size that an image claims, before anything decodes it. Raises ValueError."""
    width, height = header.width, header.height
    size = f"found {width} x {height}"
    if min(width, height) < MIN_SIDE:
        raise ValueError(f"expected an image of at least {MIN_SIDE} x {MIN_SIDE} pixels, {size}")
    if width * height > max_pixels:
        raise ValueError(f"expected an image of at most {max_pixels} pixels{setting}, {size}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"expected an image whose sides have a ratio of at most {MAX_RATIO}, {size}")


def check_places(images: Sequence[Image], text: str, name: str) -> None:
    """Check that the images of a text stand in it, in its order. Raises ValueError."""
    last = 0
    for index, image in enumerate(images):
        if not last <= image.at <= len(text):
            raise ValueError(
                f"`images[{index}].at` is {image.at}; expected {last} to {len(text)}: images stand in the order of "
                f"`{name}`, which has {len(text)} characters"
            )
        last = image.at


def check_images(images: Sequence[Image], prompt: str | Sequence[int] | None, shown: Sequence[Image] = ()) -> None:
    """Check the images beside a prompt, and how many a job has with those that its messages show. Raises ValueError."""
    if images and not isinstance(prompt, str):
        found = "none" if prompt is None else "token ids"
        raise ValueError(f"`images` needs a `prompt` of text beside it, found {found}; a chat has them in its messages")
    if isinstance(prompt, str):
        check_places(images, prompt, "prompt")
    if (num_images := len(images) + len(shown)) > MAX_IMAGES:
        field = "messages" if shown else "images"
        raise ValueError(f"`{field}` has {num_images} images; expected at most {MAX_IMAGES} in one job")
