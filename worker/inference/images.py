"""Put the images of a request into its texts and their tokens. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from scorepool import wire
from scorepool.engine import ChatCodec, InvalidRequest
from scorepool.engine.images import ImageTokens, PlacedImage, Shown, Video, VideoFile, expand
from scorepool.wire.image import DEFAULT_FPS
from scorepool.worker.inference.text_lengths import Steps, invalid_request

CHARACTERS_PER_IMAGE = 65_536  # that are encoded in the time in which an image is decoded, about


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image or a video of a request, as the model takes it."""

    field: str  # where the request has it
    image: wire.Image
    is_frame: bool = False  # of a video, for a model that takes images only


def check_images(request: wire.Request, codec: ChatCodec) -> None:
    """Check that the model takes images if the request has some, and that their files are there. Raises JobError."""
    for field, image in wire.images_of(request):
        if image.url is not None:
            raise invalid_request(field, "expected the file of an image in `data`: workers fetch nothing")
        if codec.images is not None:
            continue
        reason = codec.images_unsupported or "it is a model of texts"
        raise invalid_request(field, f"the model takes no images: {reason}")


def as_shown(images: Iterable[tuple[str, wire.Image]], codec: ChatCodec) -> Steps[list[ShownImage]]:
    """Return images, given with their fields, as the model takes them: a model without videos their frames.

    Raises JobError.
    """
    shown: list[ShownImage] = []
    for field, image in images:
        if codec.images is None or codec.images.video_marker is not None or not image.is_video:
            shown.append(ShownImage(field, image))
            continue
        yield CHARACTERS_PER_IMAGE * max(1, len(image.frames))
        try:
            frames = [wire.Image(data=frame, at=image.at) for frame in codec.images.frames_of(_video(image))]
        except InvalidRequest as error:
            raise invalid_request(field, error.message) from error
        except ValueError as error:  # the file of a video has a size that no image may have
            raise invalid_request(field, f"a frame of the video: {error}") from None
        shown += [ShownImage(field, frame, is_frame=True) for frame in frames]
    return shown


def messages_as_shown(
    messages: Sequence[wire.Message], codec: ChatCodec
) -> Steps[tuple[Sequence[wire.Message], list[ShownImage]]]:
    """Return the images of messages as the model takes them, and the messages with these. Raises JobError."""
    found, shown = [], []
    for place, message in enumerate(messages):
        fields = [(f"messages[{place}].images[{index}]", image) for index, image in enumerate(message.images)]
        own = yield from as_shown(fields, codec)
        has_frames = any(each.is_frame for each in own)
        found.append(structs.replace(message, images=[each.image for each in own]) if has_frames else message)
        shown += own
    return found, shown


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


def expand_markers(
    token_ids: list[int], shown: Sequence[ShownImage], codec: ChatCodec
) -> Steps[tuple[list[int], tuple[PlacedImage, ...]]]:
    """Put the tokens of images where their markers are. Raises JobError."""
    if not shown or codec.images is None:
        return token_ids, ()
    found: list[ImageTokens] = []
    for each in shown:
        image = each.image
        yield CHARACTERS_PER_IMAGE * max(1, len(image.frames))
        data: Shown = _video(image) if image.is_video else image.data
        try:
            found.append(codec.images.tokens_of(data))
        except InvalidRequest as error:
            raise invalid_request(each.field, error.message) from error
    try:
        expanded, placed = expand(codec.images, token_ids, found)
    except ValueError as error:
        raise invalid_request(
            shown[0].field,
            f"expected a text that shows each image once where the model's marker {codec.images.marker!r} is, found "
            f"{error}: the chat template shows no images, or the text holds the marker itself",
        ) from None
    return expanded, tuple(
        replace(image, num_frames=1) if each.is_frame else image for image, each in zip(placed, shown, strict=True)
    )
