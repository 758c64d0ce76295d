"""Put the images of a request into its texts and their tokens. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from scorepool import wire
from scorepool.engine import ChatCodec, InvalidRequest
from scorepool.engine.images import ImageCodec, ImageTokens, PlacedImage, Shown, Video, VideoFile, expand
from scorepool.wire.image import DEFAULT_FPS
from scorepool.wire.image_header import read_header
from scorepool.worker.inference.text_lengths import Steps, invalid_request

# Characters that are encoded in the time in which these are decoded, about.
CHARACTERS_PER_IMAGE = 65_536
CHARACTERS_PER_VIDEO_FILE = 2**20
PIXELS_PER_CHARACTER = 16


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image or a video of a request, as the model takes it."""

    field: str  # where the request has it
    image: wire.Image
    is_frame: bool = False  # of a video, for a model that takes images only


def num_characters_of_images(request: wire.Request) -> int:
    """Return how many characters are encoded in the time in which a request's images are decoded, about."""
    num_pixels = num_files = 0
    for _, image in wire.images_of(request):
        for header in map(read_header, image.images):
            num_pixels += header.width * header.height
        num_files += image.is_video and not image.frames
    return num_pixels // PIXELS_PER_CHARACTER + num_files * CHARACTERS_PER_VIDEO_FILE


def check_images(request: wire.Request, codec: ChatCodec) -> None:
    """Check that the model takes images if the request has some, and that their files are there. Raises JobError."""
    for field, image in wire.images_of(request):
        if image.url is not None:
            raise invalid_request(field, "expected the file of an image in `data`: workers fetch nothing")
        if codec.images is not None:
            continue
        reason = codec.images_unsupported or "it is a model of texts"
        raise invalid_request(field, f"the model takes no images: {reason}")


class RequestImages:
    """The images of one request, as its model takes them: each is decoded once, however many items show it."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        # By the identity of an image, which is kept beside what was made of it: frames, or tokens; or why not.
        self._frames: dict[int, tuple[wire.Image, list[wire.Image] | str]] = {}
        self._tokens: dict[int, tuple[wire.Image, ImageTokens | str]] = {}

    def as_shown(self, images: Iterable[tuple[str, wire.Image]]) -> Steps[list[ShownImage]]:
        """Return images, given with their fields, as the model takes them: a model without videos their frames.

        Raises JobError.
        """
        shown: list[ShownImage] = []
        codec = self._codec.images
        for field, image in images:
            if codec is None or codec.video_marker is not None or not image.is_video:
                shown.append(ShownImage(field, image))
                continue
            if id(image) not in self._frames:
                yield CHARACTERS_PER_IMAGE * max(1, len(image.frames))
                self._frames[id(image)] = image, _frames_of(image, codec)
            _, frames = self._frames[id(image)]
            if isinstance(frames, str):
                raise invalid_request(field, frames)
            shown += [ShownImage(field, frame, is_frame=True) for frame in frames]
        return shown

    def messages_as_shown(
        self, messages: Sequence[wire.Message]
    ) -> Steps[tuple[Sequence[wire.Message], list[ShownImage]]]:
        """Return the images of messages as the model takes them, and the messages with these. Raises JobError."""
        found, shown = [], []
        for place, message in enumerate(messages):
            fields = [(f"messages[{place}].images[{index}]", image) for index, image in enumerate(message.images)]
            own = yield from self.as_shown(fields)
            has_frames = any(each.is_frame for each in own)
            found.append(structs.replace(message, images=[each.image for each in own]) if has_frames else message)
            shown += own
        return found, shown

    def expand_markers(
        self, token_ids: list[int], shown: Sequence[ShownImage]
    ) -> Steps[tuple[list[int], tuple[PlacedImage, ...]]]:
        """Put the tokens of images where their markers are. Raises JobError."""
        codec = self._codec.images
        if not shown or codec is None:
            return token_ids, ()
        found: list[ImageTokens] = []
        for each in shown:
            image = each.image
            if id(image) not in self._tokens:
                yield CHARACTERS_PER_IMAGE * max(1, len(image.frames))
                self._tokens[id(image)] = image, _tokens_of(image, codec)
            _, tokens = self._tokens[id(image)]
            if isinstance(tokens, str):
                raise invalid_request(each.field, tokens)
            found.append(tokens)
        try:
            expanded, placed = expand(codec, token_ids, found)
        except ValueError as error:
            raise invalid_request(
                shown[0].field,
                f"expected a text that shows each image once where the model's marker {codec.marker!r} is, found "
                f"{error}: the chat template shows no images, or the text holds the marker itself",
            ) from None
        return expanded, tuple(
            replace(image, num_frames=1) if each.is_frame else image for image, each in zip(placed, shown, strict=True)
        )


def _frames_of(video: wire.Image, codec: ImageCodec) -> list[wire.Image] | str:
    """Return the frames of a video; or why it has none that can be shown."""
    try:
        return [wire.Image(data=frame, at=video.at) for frame in codec.frames_of(_video(video))]
    except InvalidRequest as error:
        return error.message
    except ValueError as error:  # the file of a video has a size that no image may have
        return f"a frame of the video: {error}"


def _tokens_of(image: wire.Image, codec: ImageCodec) -> ImageTokens | str:
    """Return the tokens of an image or a video; or why it cannot be shown."""
    data: Shown = _video(image) if image.is_video else image.data
    try:
        return codec.tokens_of(data)
    except InvalidRequest as error:
        return error.message


def _video(image: wire.Image) -> Video | VideoFile:
    fps = image.fps or DEFAULT_FPS
    return Video(tuple(image.frames), fps) if image.frames else VideoFile(image.data, fps)


def with_markers(text: str, shown: Sequence[ShownImage], codec: ChatCodec) -> str:
    """Return a text with the model's marker in the place of each image and each video."""
    if not shown or codec.images is None:
        return text
    pieces, last = [], 0
    for image in (each.image for each in shown):
        marker = codec.images.video_marker if image.is_video else codec.images.spelled_marker
        pieces += [text[last : image.at], marker or ""]
        last = image.at
    return "".join((*pieces, text[last:]))


def spell_markers(rendered: str, codec: ChatCodec) -> str:
    """Return a rendered chat, in which the template has put markers, as it is encoded."""
    return rendered if codec.images is None else rendered.replace(codec.images.marker, codec.images.spelled_marker)
