"""Read the images that clients send as URLs or base64, and translate them to wire images. Pure."""

import binascii
import re
from collections.abc import Iterable

from msgspec.structs import replace

from scorepool import wire
from scorepool.wire.image import MAX_FRAMES, MAX_URL_LENGTH
from scorepool.wire.video_header import VIDEO_FORMATS, is_video_file

_DATA_URL = re.compile(r"data:image/[A-Za-z0-9.+-]+((?:;[^;,]*)*),", re.IGNORECASE)
_FILE_URL = re.compile(r"data:video/(mp4|webm);base64,", re.IGNORECASE)
EXPECTED_VIDEO = "expected a video, as data:video/jpeg;base64,... with its frames, or as data:video/mp4;base64,..."
_FRAMES_URL = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)
EXPECTED = "expected a data URL, as data:image/png;base64,..., or one that begins with https://"


def to_image(url: str) -> wire.Image:
    """Return the image of a data URL, or the one that is to be fetched. Raises ValueError."""
    if url[:8].lower().startswith(("http:", "https:")):
        if len(url) > MAX_URL_LENGTH:
            raise ValueError(f"expected a URL of at most {MAX_URL_LENGTH} characters, found {len(url)}")
        return wire.Image(url=url)
    match = _DATA_URL.match(url[:200])
    if match is None or not match[1].lower().endswith(";base64"):
        raise ValueError(f"{EXPECTED}, found {wire.quote(url[:40])}")
    return from_base64(url[match.end() :], "after the data URL's comma")


def from_base64(text: str, place: str) -> wire.Image:
    """Return the image that base64 holds; `place` says where it stands. Raises ValueError."""
    data = _decoded(text, place)
    if is_video_file(data):
        raise ValueError("expected an image, found a video")
    return wire.Image(data=data)


def _decoded(text: str, place: str) -> bytes:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"expected base64 {place}: {error}") from None
    if not data:
        raise ValueError("expected an image, found no bytes")
    return data


def to_video(url: str, fps: float | None) -> wire.Image:
    """Return the video of a data URL that holds frames, each in base64 after a comma. Raises ValueError."""
    if match := _FILE_URL.match(url[:200]):
        data = _decoded(url[match.end() :], "after the data URL's comma")
        if not is_video_file(data):
            raise ValueError(f"expected an {VIDEO_FORMATS} file, found bytes that begin with {data[:8].hex(' ')}")
        return wire.Image(data=data, fps=fps)
    match = _FRAMES_URL.match(url[:200])
    if match is None:
        raise ValueError(f"{EXPECTED_VIDEO}, found {wire.quote(url[:40])}")
    frames = [_decoded(frame, "after each comma") for frame in url[match.end() :].split(",", MAX_FRAMES)]
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"expected a video of at most {MAX_FRAMES} frames, found more")
    return wire.Image(frames=frames, fps=fps)


def join(pieces: Iterable[str | wire.Image]) -> tuple[str, list[wire.Image]]:
    """Return the text of all pieces, joined without a separator, and the images with their places in it."""
    texts: list[str] = []
    images: list[wire.Image] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            at += len(piece)
        else:
            images.append(replace(piece, at=at) if at else piece)
    return "".join(texts), images
