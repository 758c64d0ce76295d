"""Follow one run of a job: which of its finished rows Redis has, and which are new. Knows no Redis.

The rows are read while the engine computes others. A row that is finished does not change, unless the engine starts it
anew because other weights serve: then it is not finished any more. So a row is checked again after it was read, and the
model is asked for before and after.
"""

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scorepool.engine import ModelInfo, Sequence
from scorepool.store import JobField, RqKeys
from scorepool.wire import CheckpointRow, Invalid, encode, parse
from scorepool.worker.inference.checkpoints.rows import fill_from_row, identity_digest, is_finished, to_row
from scorepool.worker.rq.job import Job

MAX_CHUNK_BYTES = 2**21  # a row that is larger alone is not kept
CHECKSUM_BYTES = 4
Rows = Mapping[int, Sequence]  # by index


@dataclass(frozen=True, slots=True)
class Chunk:
    """Finished rows on their way to Redis."""

    identity: bytes
    number: int
    body: bytes
    indexes: frozenset[int]


class JobCheckpoint:
    """The rows of one run of a job. The thread of the store calls all methods but the properties.

    `read_model` returns what serves now, without an adapter.
    """

    def __init__(self, job: Job, read_model: Callable[[], ModelInfo]) -> None:
        self.job_id, self.lease_key = job.id, job.lease_key
        self.registry_key = RqKeys.registry("wip", job.origin)
        self.may_restore = JobField.CHECKPOINT in job.fields  # Redis has rows of an earlier run
        self.began_at = time.monotonic()
        self.is_stopped = False  # nothing more is kept
        self.rows: Rows = {}  # those that the engine computes
        self._read_model = read_model
        self._identity = b""
        self._num_chunks = 0
        self._saved: set[int] = set()
        self._too_large: set[int] = set()

    @property
    def saved(self) -> frozenset[int]:
        """The indexes of the rows that Redis has."""
        return frozenset(self._saved)

    def restore(self, rows: Rows, info: ModelInfo, read_chunk: Callable[[bytes, int, int], bytes | None]) -> None:
        """Give rows the values that Redis has: `saved` are their indexes afterwards, also after an error.

        `read_chunk` gets the identity of the model, a chunk's number and how many rows the chunk before gave.
        """
        self.may_restore = False
        self._identity = identity_digest(info)
        num_new = 0
        while (body := read_chunk(self._identity, self._num_chunks, num_new)) is not None:
            self._num_chunks += 1
            num_before = len(self._saved)
            for row in decode_chunk(body):
                sequence = None if row.index in self._saved else rows.get(row.index)
                if sequence is not None and fill_from_row(sequence, row, self._identity, info):
                    self._saved.add(row.index)
            num_new = len(self._saved) - num_before

    def take(self, max_bytes: int) -> Chunk | None:
        """Return finished rows that Redis does not have, about as many as fit; None without one."""
        info = self._model_of_rows()
        if info is None or self.is_stopped:
            return None
        identity = identity_digest(info)
        if identity != self._identity:
            self._identity = identity
            self.forget()
        bodies: dict[int, bytes] = {}
        size = 0
        for index, sequence in self.rows.items():
            if index in self._saved or index in self._too_large or not is_finished(sequence):
                continue
            body = encode(to_row(index, identity, sequence))
            if not is_finished(sequence):
                continue
            if len(body) > MAX_CHUNK_BYTES:
                self._too_large.add(index)
                continue
            computed_by = sequence.model_info
            if computed_by is not None and identity_digest(computed_by) != identity:
                continue
            if bodies and size + len(body) > max_bytes:
                break
            bodies[index] = body
            size += len(body)
        after = self._model_of_rows()
        if not bodies or after is None or identity_digest(after) != identity:
            return None
        return Chunk(identity, self._num_chunks, join_rows(list(bodies.values())), frozenset(bodies))

    def confirm(self, chunk: Chunk) -> None:
        """Note that Redis has a chunk."""
        self._num_chunks = chunk.number + 1
        self._saved |= chunk.indexes

    def forget(self) -> None:
        """Note that Redis has none of the rows."""
        self._num_chunks = 0
        self._saved.clear()

    def _model_of_rows(self) -> ModelInfo | None:
        """Return what computes the rows now; None if the engine has not taken them yet."""
        first = next(iter(self.rows.values()), None)
        if first is None or (first.adapter_name is not None and first.adapter is None):
            return None
        info = self._read_model()
        return info if first.adapter is None else replace(info, adapter=first.adapter.label)


def join_rows(bodies: list[bytes]) -> bytes:
    """Return a chunk: the CRC-32 of the msgpack array of encoded rows, and the array."""
    array = b"\xdd" + len(bodies).to_bytes(4, "big") + b"".join(bodies)
    return zlib.crc32(array).to_bytes(CHECKSUM_BYTES, "big") + array


def decode_chunk(body: bytes) -> list[CheckpointRow]:
    """Return the rows of a chunk; none if it is damaged or cannot be decoded."""
    array = body[CHECKSUM_BYTES:]
    if zlib.crc32(array).to_bytes(CHECKSUM_BYTES, "big") != body[:CHECKSUM_BYTES]:
        return []
    try:
        return parse(array, list[CheckpointRow], "msgpack")
    except Invalid:
        return []
