"""Read the lines of a file in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from scorepool.files.errors import BadInput

MAX_LINE_BYTES = 32 * 2**20  # the largest request that a server takes by default
_UTF8_BOM = b"\xef\xbb\xbf"
# What other files begin with, the longer first.
_OTHER_BEGINNINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "compressed by gzip",
    b"PK\x03\x04": "a ZIP archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line. `data` is missing if it has more than MAX_LINE_BYTES."""

    number: int  # 1 is the first
    position: int  # of the file after the line, in bytes
    data: bytes | None


def read_lines(file: BinaryIO, name: str) -> Iterator[Line]:
    """Yield the lines of a file. Raises BadInput if it is not UTF-8 by its first bytes."""
    position = number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        position += len(data)
        if number == 1:
            for beginning, found in _OTHER_BEGINNINGS.items():
                if data.startswith(beginning):
                    raise BadInput(f"{name} is {found}: expected lines of UTF-8 text")
            if b"\0" in data[:4]:
                raise BadInput(f"{name} has zero bytes, as UTF-16 has: expected lines of UTF-8 text")
            data = data.removeprefix(_UTF8_BOM)
        if len(data) <= MAX_LINE_BYTES:
            yield Line(number, position, data)
            continue
        while not data.endswith(b"\n") and (data := file.readline(2**20)):
            position += len(data)
        yield Line(number, position, None)


def too_long() -> str:
    """Return the reason why a row without data is not read."""
    return f"the line has more than {MAX_LINE_BYTES} bytes"
