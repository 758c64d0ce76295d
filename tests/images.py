"""Images in memory, and headers of images that nobody could hold in memory."""

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image


def image_bytes(width: int = 32, height: int = 24, *, kind: str = "PNG", shade: int = 0, **options: Any) -> bytes:
    """Return an image with a gradient, so that every region differs."""
    image = Image.new("RGB", (width, height))
    image.putdata([((x * 7 + shade) % 256, (y * 5) % 256, (x * y) % 256) for y in range(height) for x in range(width)])
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and holds no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
