"""An image's format and size are read from its first bytes; what is no image is refused in one sentence."""

import struct
from contextlib import suppress

import pytest

from scorepool import wire
from scorepool.wire.image_header import read_header
from tests.images import image_bytes, png_header


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"progressive": True}, {"exif": b"Exif\x00\x00" * 9}])
def test_the_size_is_pillows(kind: str, options: dict[str, object]):
    assert read_header(image_bytes(37, 21, kind=kind, **options)) == (kind, 37, 21)


def test_of_a_gif_the_frame_may_be_larger_than_the_screen():
    gif = bytearray(image_bytes(8, 8, kind="GIF"))
    at = gif.index(b"\x2c\x00\x00\x00\x00\x08\x00\x08\x00")
    gif[at + 5 : at + 9] = struct.pack("<HH", 60_000, 50_000)
    assert read_header(bytes(gif)) == ("GIF", 60_000, 50_000)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_header_that_ends_early_is_no_image(kind: str):
    whole = image_bytes(37, 21, kind=kind)
    lengths = range(len(whole))
    enough = next(length for length in lengths if _reads(whole[:length]))
    assert read_header(whole[:enough]) == (kind, 37, 21)
    assert all(_reads(whole[:length]) == (length >= enough) for length in lengths)


def _reads(data: bytes) -> bool:
    """True if the header is whole; any error but a ValueError fails the test."""
    with suppress(ValueError):
        read_header(data)
        return True
    return False


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            b"hello world",
            "expected a PNG, JPEG, WebP or GIF image, found bytes that begin with 68 65 6c 6c 6f 20 77 6f",
        ),
        (b"%PDF-1.7", "expected a PNG, JPEG, WebP or GIF image"),
        (b"\xff\xd8\xff\xda\x00\x02", "expected the size of a JPEG image before its pixels, found none"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIDAT", "expected a PNG image that begins with its header"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00\x3b", "expected a GIF image with a frame"),
        (b"RIFF\x00\x00\x00\x00WEBPXXXX", "expected a WebP image of VP8"),
        (png_header(1, 1), "expected an image of at least 4 x 4 pixels, found 1 x 1"),
        (png_header(0, 100), "expected an image of at least 4 x 4 pixels, found 0 x 100"),
        (png_header(50_000, 50_000), "expected an image of at most 67108864 pixels, found 50000 x 50000"),
        (b"\xff\xd8" + b"\xff" * 2**17, "expected the size of a JPEG image among its first 65536 parts, found none"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2**17, "expected the size of a JPEG image among its first 65536 parts"),
        (
            b"GIF89a" + bytes(7) + b"\x21\xff\x00" * 2**17,
            "expected the size of a GIF image among its first 65536 parts",
        ),
        (png_header(4, 1000), "expected an image whose sides have a ratio of at most 200, found 4 x 1000"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_sentence(data: bytes, says: str):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message follows
        wire.Image(data=data)
    assert str(refused.value).startswith(says)
