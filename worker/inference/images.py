"""Put the images of a request into its texts and their tokens. Pure."""

from collections.abc import Sequence

from scorepool import wire
from scorepool.engine import ChatCodec, InvalidRequest
from scorepool.engine.images import ImageTokens, PlacedImage, Shown, Video, VideoFile, expand
from scorepool.wire.image import DEFAULT_FPS
from scorepool.worker.inference.text_lengths import Steps, invalid_request

CHARACTERS_PER_IMAGE = 65_536  # that are encoded in the time in which an image is decoded, about


def check_images(request: wire.Request, codec: ChatCodec) -> None:
    """Check that the model takes images if the request has some, and that their files are there. Raises JobError."""
    for field, image in wire.images_of(request):
        if image.url is not None:
            raise invalid_request(field, "expected the file of an image in `data`: workers fetch nothing")
        if codec.images is not None:
            if image.is_video and codec.images.video_marker is None:
                raise invalid_request(
                    field,
                    f"models of the family {codec.images.family} take no videos; expected images, such as frames of it",
                )
            continue
        reason = codec.images_unsupported or "it is a model of texts"
        raise invalid_request(field, f"the model takes no images: {reason}")


def _shown(image: wire.Image) -> Shown:
    fps = image.fps or DEFAULT_FPS
    if image.frames:
        return Video(tuple(image.frames), fps)
    return VideoFile(image.data, fps) if image.is_video else image.data


def with_markers(text: str, images: Sequence[wire.Image], codec: ChatCodec) -> str:
    """Return a text with the model's marker in the place of each image and each video."""
    if not images or codec.images is None:
        return text
    pieces, last = [], 0
    for image in images:
        marker = codec.images.video_marker if image.is_video else codec.images.spelled_marker
        pieces += [text[last : image.at], marker or ""]
        last = image.at
    return "".join((*pieces, text[last:]))


def spell_markers(rendered: str, codec: ChatCodec) -> str:
    """Return a rendered chat, in which the template has put markers, as it is encoded."""
    return rendered if codec.images is None else rendered.replace(codec.images.marker, codec.images.spelled_marker)


def expand_markers(
    token_ids: list[int], images: Sequence[tuple[str, wire.Image]], codec: ChatCodec
) -> Steps[tuple[list[int], tuple[PlacedImage, ...]]]:
    """Put the tokens of images, given with their fields, where their markers are. Raises JobError."""
    if not images or codec.images is None:
        return token_ids, ()
    found: list[ImageTokens] = []
    for field, image in images:
        yield CHARACTERS_PER_IMAGE * max(1, len(image.frames))
        try:
            found.append(codec.images.tokens_of(_shown(image)))
        except InvalidRequest as error:
            raise invalid_request(field, error.message) from error
    try:
        return expand(codec.images, token_ids, found)
    except ValueError as error:
        raise invalid_request(
            images[0][0],
            f"expected a text that shows each image once where the model's marker {codec.images.marker!r} is, found "
            f"{error}: the chat template shows no images, or the text holds the marker itself",
        ) from None
