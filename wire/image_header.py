"""Read an image's format and size from its first bytes, without decoding a pixel. Pure.

The sizes are those that a decoder allocates memory for: of a GIF, the larger of its screen and its first frame.
"""

from collections.abc import Callable
from typing import NamedTuple

FORMATS = "PNG, JPEG, WebP or GIF"
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_GIF = (b"GIF87a", b"GIF89a")
# A JPEG's markers: those of frames hold the size, those without a length stand alone.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
MAX_PARTS = 2**16  # of a file that stand before its size: cameras write dozens, and a client could write millions


class ImageHeader(NamedTuple):
    """Say what an image claims to be."""

    format: str  # as Pillow names it
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Return an image's format and size. Raises ValueError for what is no image of a known format."""
    if data.startswith(_PNG):
        return _read("PNG", data, _png_size)
    if data.startswith(_JPEG):
        return _read("JPEG", data, _jpeg_size)
    if data[:6] in _GIF:
        return _read("GIF", data, _gif_size)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _read("WEBP", data, _webp_size)
    found = f"bytes that begin with {data[:8].hex(' ')}" if data else "no bytes"
    raise ValueError(f"expected a {FORMATS} image, found {found}")


def _read(name: str, data: bytes, size_of: Callable[[bytes], tuple[int, int]]) -> ImageHeader:
    try:
        width, height = size_of(data)
    except IndexError:
        raise ValueError(f"expected a whole {name} image, found {len(data)} bytes that end in its header") from None
    return ImageHeader(name, width, height)


def _too_late(name: str) -> ValueError:
    return ValueError(f"expected the size of a {name} image among its first {MAX_PARTS} parts, found none")


def _number(data: bytes, start: int, num_bytes: int, *, is_little: bool = False) -> int:
    found = data[start : start + num_bytes]
    if len(found) < num_bytes:
        raise IndexError(start)
    return int.from_bytes(found, "little" if is_little else "big")


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("expected a PNG image that begins with its header, found another chunk")
    return _number(data, 16, 4), _number(data, 20, 4)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MAX_PARTS):
        if data[at] != 0xFF:
            raise ValueError(f"expected a marker at byte {at} of a JPEG image, found {data[at]:#04x}")
        marker = data[at + 1]
        if marker == 0xFF:  # padding may stand before a marker
            at += 1
            continue
        at += 2
        if marker in _FRAMES:
            return _number(data, at + 5, 2), _number(data, at + 3, 2)
        if marker == 0xDA:
            raise ValueError("expected the size of a JPEG image before its pixels, found none")
        if marker not in _ALONE:
            at += max(2, _number(data, at, 2))
    raise _too_late("JPEG")


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height = _number(data, 6, 2, is_little=True), _number(data, 8, 2, is_little=True)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] >> 7 else 0)
    in_extension = False  # whose blocks end with an empty one
    for _ in range(MAX_PARTS):
        if in_extension:
            in_extension = data[at] != 0
            at += data[at] + 1
        elif data[at] == 0x21:
            in_extension = True
            at += 2
        else:
            break
    else:
        raise _too_late("GIF")
    if data[at] != 0x2C:
        raise ValueError("expected a GIF image with a frame, found none")
    left, top, frame_width, frame_height = (_number(data, at + 1 + 2 * each, 2, is_little=True) for each in range(4))
    return max(width, left + frame_width), max(height, top + frame_height)


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + _number(data, 24, 3, is_little=True), 1 + _number(data, 27, 3, is_little=True)
    if kind == b"VP8L":
        bits = _number(data, 21, 4, is_little=True)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return _number(data, 26, 2, is_little=True) & 0x3FFF, _number(data, 28, 2, is_little=True) & 0x3FFF
    raise ValueError(f"expected a WebP image of VP8, VP8L or VP8X, found {kind!r}")
