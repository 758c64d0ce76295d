"""Count what the tables of an MP4 file say that it has, before a demuxer makes entries of them. Pure.

A table may name any number of samples in a few bytes, each of which takes the demuxer 70 bytes of memory: a file of
3 KB could take 12 GB. What the tables are called is searched for outside of the media data, wherever it stands.
"""

import re
from collections.abc import Iterator

from scorepool.engine.errors import InvalidRequest

MAX_SAMPLES = 2**22  # 300 MB of a demuxer's entries: 87 s of 16-bit stereo sound, of which each moment is a sample
_COUNTS = {b"stsz": 12, b"stz2": 12, b"trun": 8, b"elst": 8}  # where the number stands, from the name on
_NAMES = re.compile(b"stsz|stz2|trun|elst|cmov")


def check_tables(data: bytes) -> None:
    """Check an MP4 file. Raises InvalidRequest."""
    num_samples, num_edits = 0, 1  # each edit may repeat all samples
    for start, end in _boxes(data):
        for match in _NAMES.finditer(data, start, end):
            if match[0] == b"cmov":
                raise InvalidRequest("a video has a compressed header; expected one that is not")
            at = match.start() + _COUNTS[match[0]]
            count = int.from_bytes(data[at : at + 4], "big")
            if match[0] == b"elst":
                num_edits += max(0, count - 1)
            else:
                num_samples += count
    most = min(MAX_SAMPLES, len(data))
    if num_samples * num_edits > most:
        raise InvalidRequest(
            f"a video of {len(data)} bytes claims {num_samples} samples and {num_edits} edits of them; expected at "
            f"most {most} together"
        )


def _boxes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the outermost boxes begin and end, without those of media data."""
    at = 0
    while at + 8 <= len(data):
        size, kind, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        end = len(data) if size < head else min(len(data), at + size)
        if kind != b"mdat":
            yield at, end
        at = end
