"""Count the scans of a JPEG file, each of which goes over all of its pixels, before it is decoded. Pure.

A progressive file has about ten. One of 50 bytes is enough for millions of pixels, so that a file could take hours.
"""

import re

_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # that has a length; in coded pixels 00 or a restart follows ff
_SCAN, _END = 0xDA, 0xD9


def num_scans(data: bytes) -> int:
    """Return how often a decoder goes over the pixels of a JPEG file."""
    count, at = 0, 2
    while (match := _MARKER.search(data, at)) and data[match.end() - 1] != _END:
        count += data[match.end() - 1] == _SCAN
        at = match.end() + max(2, int.from_bytes(data[match.end() : match.end() + 2], "big"))
    return count
