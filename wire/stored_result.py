"""A result beside Redis: what the queue records of it, and the bytes of its object.

An object is a sequence of frames, each with its length and its CRC-32, so that a reader holds one at a time and finds
damage before it uses what is damaged. The checksum covers the object's path and the frame's number, too: the object of
another job, and frames in another order, are damage. The first frame is the `Result` without its sequences; each of the
others is a list of sequences, in their order.
"""

import zlib
from collections.abc import Iterable, Iterator
from struct import Struct as ByteStruct
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from scorepool.wire.codec import Invalid, encode, parse
from scorepool.wire.result import Failure, Result, SequenceResult

FRAME_BYTES = 256 * 1024  # of sequences, about; one that has more has a frame of its own
MAX_RECORD_BYTES = 512  # of an encoded StoredResult, which is how Redis's scripts and the API tell it from a result
_HEADER = ByteStruct(">QI")  # length and CRC-32
_ARRAY_HEADER_BYTES = 5


class StoredResult(Struct, tag="stored", frozen=True, kw_only=True):
    """Record that a job's result is in the result store, under its id and that of the execution that computed it."""

    execution: str
    num_bytes: Annotated[int, Meta(ge=0)]  # of the object
    num_sequences: Annotated[int, Meta(ge=0, lt=2**32)]


RecordedOutcome = Result | Failure | StoredResult  # what Redis holds of a job's end


def decode_recorded(body: bytes) -> RecordedOutcome:
    """Decode an outcome stored in Redis; raise Invalid."""
    return parse(body, RecordedOutcome, "msgpack")  # type: ignore[arg-type]


def to_frames(result: Result, path: str) -> Iterator[bytes]:
    """Encode a result as the frames of the object at this path."""
    return (
        _HEADER.pack(len(body), _checksum(body, path, number)) + body for number, body in enumerate(_bodies(result))
    )


def _bodies(result: Result) -> Iterator[bytes]:
    yield encode(replace(result, sequences=[]))
    encoded: list[bytes] = []
    num_bytes = 0
    for sequence in result.sequences:
        one = encode(sequence)
        if encoded and num_bytes + len(one) > FRAME_BYTES:
            yield _array(encoded)
            encoded, num_bytes = [], 0
        encoded.append(one)
        num_bytes += len(one)
    if encoded:
        yield _array(encoded)


def read_object(body: bytes, path: str, num_bytes: int) -> Result:
    """Decode the result that an object of this path and size holds. Raises Invalid."""
    if len(body) != num_bytes:
        raise Invalid(f"a stored result is damaged: it has {len(body)} bytes instead of {num_bytes}")
    reader = FrameReader(path, num_bytes)
    bodies = list(reader.feed(body))
    reader.check_end()
    return from_frames(bodies)


def from_frames(bodies: Iterable[bytes]) -> Result:
    """Decode the result that the bodies of all frames hold. Raises Invalid."""
    found = iter(bodies)
    head = decode_head(next(found, b""))
    return replace(head, sequences=[sequence for body in found for sequence in decode_sequences(body)])


def decode_head(body: bytes) -> Result:
    """Decode the first frame: a result without its sequences. Raises Invalid."""
    return parse(body, Result, "msgpack", "a stored result")


def decode_sequences(body: bytes) -> list[SequenceResult]:
    """Decode one of the other frames. Raises Invalid."""
    return parse(body, list[SequenceResult], "msgpack", "a stored result")


def count_sequences(body: bytes) -> int:
    """Return how many sequences one of the other frames has."""
    return int.from_bytes(body[1:_ARRAY_HEADER_BYTES], "big")


def without_array_header(body: bytes) -> bytes:
    """Return the encoded sequences of one of the other frames, one after the other."""
    return body[_ARRAY_HEADER_BYTES:]


class FrameReader:
    """Divide the bytes of an object, which come in chunks of any size, into frames."""

    def __init__(self, path: str, num_bytes: int) -> None:
        """Read an object of this path and size."""
        self._path = path
        self._num_missing = num_bytes  # of the frames that are not complete
        self._num_frames = 0
        self._buffer = bytearray()

    @property
    def begun_bytes(self) -> int:
        """The size of the body of the frame of which a part has been fed; 0 if its header is not complete."""
        if len(self._buffer) < _HEADER.size:
            return 0
        length, _ = _HEADER.unpack_from(self._buffer)
        return int(length)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk, and yield the bodies of the frames that it completes. Raises Invalid if one is damaged."""
        self._buffer += chunk
        while len(self._buffer) >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if end > self._num_missing:
                raise Invalid("a stored result is damaged: a frame is longer than the rest of the object")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            self._num_missing -= end
            if _checksum(body, self._path, self._num_frames) != checksum:
                raise Invalid("a stored result is damaged: its checksum differs")
            self._num_frames += 1
            yield body

    def check_end(self) -> None:
        """Raise Invalid if the object ends within a frame."""
        if self._num_missing:
            raise Invalid("a stored result is damaged: its end is missing")


def _checksum(body: bytes, path: str, number: int) -> int:
    return zlib.crc32(body, zlib.crc32(f"{path} {number}".encode()))


def _array(encoded: list[bytes]) -> bytes:
    """Join encoded values as a msgpack array with a 32-bit length."""
    return b"\xdd" + len(encoded).to_bytes(4, "big") + b"".join(encoded)
