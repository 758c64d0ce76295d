"""Read the images that clients send as URLs, and translate them to wire images. Pure."""

import binascii
import re

from scorepool import wire

_DATA_URL = re.compile(r"data:image/[A-Za-z0-9.+-]+((?:;[^;,]*)*),", re.IGNORECASE)
EXPECTED = "expected a data URL, as data:image/png;base64,..."


def to_image(url: str, at: int = 0) -> wire.Image:
    """Return the image of a data URL, which stands after `at` characters of its text. Raises ValueError."""
    if url[:8].lower().startswith(("http:", "https:")):
        raise ValueError(f"{EXPECTED}, because this server fetches no images, found {wire.quote(url)}")
    match = _DATA_URL.match(url[:200])
    if match is None or not match[1].lower().endswith(";base64"):
        raise ValueError(f"{EXPECTED}, found {wire.quote(url[:40])}")
    return from_base64(url[match.end() :], at)


def from_base64(text: str, at: int = 0) -> wire.Image:
    """Return the image that base64 holds. Raises ValueError."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"expected base64 after the data URL's comma: {error}") from None
    if not data:
        raise ValueError("expected an image, found no bytes")
    return wire.Image(data=data, at=at)
