"""Check the images of a request against the server's settings. Nothing is decoded. Pure."""

from scorepool import wire
from scorepool.api.http.errors import ApiError, BadRequest, TooLarge
from scorepool.store import ImageUrl, Settings
from scorepool.wire.image import check_size
from scorepool.wire.image_header import read_header


def check_file(image: wire.Image, field: str, settings: Settings) -> None:
    """Check an image's file, or those of a video's frames. Raises BadRequest, TooLarge."""
    if len(image.frames) > settings.max_video_frames:
        raise TooLarge(
            f"{field}: expected a video of at most {settings.max_video_frames} frames (SCOREPOOL_MAX_VIDEO_FRAMES), "
            f"found {len(image.frames)}",
            field,
        )
    for file in image.frames or [image.data]:
        if len(file) > settings.max_image_bytes:
            raise too_large(field, f"found {len(file)}", settings)
    for file in image.images:
        try:
            check_size(read_header(file), settings.max_image_pixels, " (SCOREPOOL_MAX_IMAGE_PIXELS)")
        except ValueError as error:
            raise BadRequest(f"{field}: {error}", field) from None


def check_url(url: str, field: str, settings: Settings) -> None:
    """Check that the operator lets images be fetched, and from there. Raises BadRequest."""
    try:
        parse_url(url, settings)
    except ValueError as error:
        raise BadRequest(f"{field}: {error}", field) from None


def parse_url(url: str, settings: Settings) -> ImageUrl:
    """Return the parts of an image's URL. Raises ValueError, whose text has no query."""
    if settings.fetch_images == "off":
        raise ValueError(
            "this server fetches no images (SCOREPOOL_FETCH_IMAGES is off); expected the image itself, as a data URL "
            "or in base64"
        )
    return ImageUrl.parse(url, allow_private=settings.fetch_images == "any")


def too_large(field: str, found: str, settings: Settings) -> ApiError:
    """Build the error for a file that is too large."""
    return TooLarge(
        f"{field}: expected an image of at most {settings.max_image_bytes} bytes (SCOREPOOL_MAX_IMAGE_BYTES), {found}",
        field,
    )
