"""Read the lines of a file in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from scorepool.files.errors import BadInput

MAX_LINE_BYTES = 32 * 2**20  # the largest request that a server takes by default
_UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip"}


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
            if encoding := _OTHER_BOMS.get(data[:2]):
                raise BadInput(f"{name} is {encoding}: expected UTF-8 text")
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
