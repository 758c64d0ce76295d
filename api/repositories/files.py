"""Keep owners' files in Redis: the input and output of batches.

They are in Redis and not on this process's disk because any API process on any machine may be asked for them and may
drive the batch, and because the output of a batch grows in the transaction that writes its progress. The cost is
memory of Redis. A chunk is about CHUNK_BYTES of whole lines, compressed (JSONL to a fourth or less).
"""

import asyncio
import logging
import re
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from starlette.concurrency import run_in_threadpool

from scorepool import store, wire
from scorepool.api.http.errors import Conflict, NotFound, TooLarge, TooManyUploads
from scorepool.api.http.large_replies import PIECE_BYTES, HeldResults
from scorepool.api.repositories import decode
from scorepool.api.repositories.owned import read_owned
from scorepool.api.repositories.pages import add_to_list, page_after
from scorepool.api.repositories.quota import Quota, refusal
from scorepool.store.scripts import load
from scorepool.wire.file import FileObject

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
UPLOAD_TTL_S = 3600  # of chunks whose upload was cut off
_CHUNK_END = re.compile(rb"([0-9]{1,9})\.([0-9]{1,15})")
_ID = re.compile(r"file-[0-9a-f]{32}")
# Uploads at once to one API process: each takes disk and a connection.
MAX_UPLOADS = 32
MAX_UPLOADS_OF_OWNER = 8
ENDS_AT_ONCE = 1000  # ends of chunks that are read at once
COMPRESSION = 1  # zlib's fastest level: half of the gain of its best level in a tenth of the time


class Upload(Protocol):
    """Give a file piece by piece; empty at its end."""

    async def read(self, size: int) -> bytes: ...


class ChunkEnd(NamedTuple):
    """Say how many lines and bytes a file has up to the end of a chunk, in Redis as `<lines>.<bytes>`.

    It saves readers who begin later the earlier chunks. Chunks of uploads have none.
    """

    num_lines: int
    num_bytes: int

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """Parse an end; None if it is missing or has another form."""
        match = _CHUNK_END.fullmatch(value) if isinstance(value, bytes) else None
        return match and cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.num_lines}.{self.num_bytes}"


class Files:
    """Save, read, list and delete files."""

    def __init__(self, redis: Redis, settings: store.Settings, quota: Quota) -> None:
        self._redis = redis
        self._settings = settings
        self._quota = quota
        self._store_chunk = redis.register_script(load("store_chunk.lua"))
        self._delete = redis.register_script(load("delete_file.lua"))
        self._uploads: Counter[str] = Counter()  # that are being read, by owner

    @contextmanager
    def count_upload(self, owner: str) -> Iterator[None]:
        """Count an upload until the context ends; raise TooManyUploads."""
        if self._uploads[owner] >= MAX_UPLOADS_OF_OWNER:
            raise TooManyUploads(f"you are uploading {MAX_UPLOADS_OF_OWNER} files already; wait until one has ended")
        if self._uploads.total() >= MAX_UPLOADS:
            raise TooManyUploads(f"{MAX_UPLOADS} files are being uploaded to this server already; try again soon")
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1

    async def save(self, owner: str, file_id: str, filename: str, upload: Upload, ttl_s: int) -> FileObject:
        """Save the input file of a batch; raise TooLarge, QueueFull or Unavailable."""
        num_bytes, num_chunks, num_lines = 0, 0, 0
        async for chunk in chunks_of_lines(upload, self._settings.max_body_bytes):
            await self._save_chunk(owner, file_id, num_chunks, chunk)
            num_bytes, num_chunks = num_bytes + len(chunk), num_chunks + 1
            num_lines += chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        if num_chunks == 0:
            await self._save_chunk(owner, file_id, 0, b"")  # an empty file counts too
        now = await decode.now_s(self._redis)
        file = FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=int(now),
            expires_at=int(now) + ttl_s,
            filename=filename,
            purpose="batch",
            num_lines=num_lines,
        )
        async with self._redis.pipeline() as pipeline:
            publish_file(pipeline, owner, file, now)
            await pipeline.execute()
        return file

    async def _save_chunk(self, owner: str, file_id: str, number: int, chunk: bytes) -> None:
        compressed = await run_in_threadpool(compress, chunk)
        args: list[str | bytes | int] = [owner, file_id, number, compressed, UPLOAD_TTL_S, self._quota.max_bytes]
        answer = await self._store_chunk(args=args)
        if answer != [b"stored"]:
            raise refusal(answer)

    async def read(self, owner: str, file_id: str) -> FileObject:
        """Return the file's record; raise NotFound."""
        check_file_id(file_id)
        [file] = await self._read(owner, [file_id])
        if file is None:
            raise file_not_found(file_id)
        return file

    async def read_chunk(self, file_id: str, number: int) -> bytes | None:
        """Return a chunk, or None after the last one and for one that cannot be decompressed."""
        compressed: Any = await self._redis.hget(store.Keys.file_parts(file_id), str(number))
        try:
            return None if compressed is None else await run_in_threadpool(zlib.decompress, compressed)
        except zlib.error:
            logger.warning("chunk %d of the file %s cannot be decompressed", number, file_id)
            return None

    async def chunks(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the chunks of a file, decompressed."""
        number = 0
        while (chunk := await self.read_chunk(file_id, number)) is not None:
            yield chunk
            number += 1

    async def content(
        self, file: FileObject, num_skipped_lines: int, held: HeldResults
    ) -> tuple[int, AsyncGenerator[bytes]]:
        """Return the bytes of a file after so many lines, and pieces of at least those. Raises TooManyResults."""
        number, end = await self._chunk_after(file.id, num_skipped_lines)
        pieces = self.pieces(file.id, held, number)
        num_bytes, num_left = file.bytes - end.num_bytes, num_skipped_lines - end.num_lines
        rest = b""
        while num_left > 0 and (rest := await anext(pieces, b"")):
            await asyncio.sleep(0)
            skipped = _end_of_lines(rest, num_left)
            num_left -= rest.count(b"\n", 0, skipped)
            rest, num_bytes = rest[skipped:], num_bytes - skipped
        return max(0, num_bytes), _limited(rest, pieces, num_bytes)

    async def _chunk_after(self, file_id: str, num_lines: int) -> tuple[int, ChunkEnd]:
        """Return the last chunk that begins after at most so many lines, and the end of the one before."""
        key, number, end = store.Keys.file_parts(file_id), 0, ChunkEnd(0, 0)
        while end.num_lines < num_lines:
            fields = [store.Keys.chunk_end(number + index) for index in range(ENDS_AT_ONCE)]
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hmget(key, fields)
                [values] = await decode.execute(pipeline)
            for value in values or [None]:
                next_end = ChunkEnd.parse(value)
                if next_end is None or next_end.num_lines > num_lines:
                    return number, end
                number, end = number + 1, next_end
        return number, end

    async def pieces(self, file_id: str, held: HeldResults, number: int) -> AsyncGenerator[bytes]:
        """Yield a file from a chunk on, in pieces of at most PIECE_BYTES, decompressed.

        A chunk is as large as its longest line, and may be a thousand times smaller in Redis. So it is never
        decompressed as a whole, and the bytes of the largest one count in `held`. Raises TooManyResults.
        """
        key = store.Keys.file_parts(file_id)
        while True:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hstrlen(key, str(number))
                [num_bytes] = await decode.execute(pipeline)
            held.add_up_to(num_bytes or 0)
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hget(key, str(number))
                [compressed] = await decode.execute(pipeline)
            if compressed is None:
                return
            try:
                for piece in decompressed(compressed):
                    yield piece
            except zlib.error:
                logger.warning("chunk %d of the file %s cannot be decompressed", number, file_id)
                return
            number += 1

    async def page(
        self, owner: str, after: str | None, limit: int, purpose: str | None, newest_first: bool
    ) -> tuple[list[FileObject], bool]:
        """Return a page of the owner's files, and True if more follow. Raise BadRequest."""

        async def read(ids: Sequence[str]) -> list[FileObject | None]:
            found = await self._read(owner, ids)
            return [file if file and purpose in (None, file.purpose) else None for file in found]

        return await page_after(self._redis, store.Keys.files_of(owner), after, limit, read, newest_first)

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file; raise NotFound, or Conflict while a batch reads or writes it."""
        if (await self.read(owner, file_id)).status == "uploaded":
            raise _used_by_batch("writes")
        answer = await self._delete(args=[file_id, owner])
        if answer == b"absent":
            raise file_not_found(file_id)
        if answer == b"read":
            raise _used_by_batch("reads")

    async def _read(self, owner: str, file_ids: Sequence[str]) -> list[FileObject | None]:
        rows = await read_owned(self._redis, owner, [store.Keys.file(file_id) for file_id in file_ids], ["file"])
        return [decode.message(row[0], FileObject, "msgpack") if row else None for row in rows]


def _used_by_batch(what: str) -> Conflict:
    return Conflict(
        f"a batch that has not ended {what} this file; cancel the batch first: GET /v1/batches lists it", "id"
    )


def write_file(pipeline: Pipeline, owner: str, file: FileObject) -> None:
    """Add the commands that write the record of a file. Its chunks exist."""
    pipeline.hset(store.Keys.file(file.id), mapping={"owner": owner, "file": wire.encode(file)})


def publish_file(pipeline: Pipeline, owner: str, file: FileObject, now: float) -> None:
    """Add the commands that write and list a file that stays as it is until it expires. `now` is a unix time, s."""
    ttl_s = file.expires_at - file.created_at
    write_file(pipeline, owner, file)
    pipeline.expire(store.Keys.file(file.id), ttl_s)
    pipeline.expire(store.Keys.file_parts(file.id), ttl_s)
    add_to_list(pipeline, store.Keys.files_of(owner), file.id, now, ttl_s)


def _end_of_lines(text: bytes, num_lines: int) -> int:
    """Return where the first lines of a text end; its length if it has fewer."""
    end = 0
    for _ in range(num_lines):
        end = text.find(b"\n", end) + 1
        if not end:
            return len(text)
    return end


async def _limited(first: bytes, pieces: AsyncGenerator[bytes], num_bytes: int) -> AsyncGenerator[bytes]:
    """Yield so many bytes of pieces: chunks that were written since belong to the next reader."""
    try:
        while num_bytes > 0 and (piece := first or await anext(pieces, b"")):
            first, num_bytes = b"", num_bytes - len(piece)
            yield piece
    finally:
        await pieces.aclose()


def compress(chunk: bytes) -> bytes:
    """Compress a chunk as it is stored."""
    return zlib.compress(chunk, COMPRESSION)


def decompressed(chunk: bytes) -> Iterator[bytes]:
    """Decompress a chunk in pieces of at most PIECE_BYTES. Raises zlib.error."""
    stream = zlib.decompressobj()
    for start in range(0, len(chunk), PIECE_BYTES):
        rest, piece = chunk[start : start + PIECE_BYTES], b""
        while rest or len(piece) == PIECE_BYTES:  # a full piece: more of the output may wait
            piece = stream.decompress(rest, PIECE_BYTES)
            rest = stream.unconsumed_tail
            if piece:
                yield piece
    if not stream.eof:
        raise zlib.error("it ends early")


async def chunks_of_lines(upload: Upload, max_line_bytes: int) -> AsyncIterator[bytes]:
    """Yield chunks of about CHUNK_BYTES that end with a line; raise TooLarge."""
    rest, number = bytearray(), 1  # of the line that `rest` begins
    while data := await upload.read(CHUNK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            number += data.count(b"\n")
            yield bytes(rest) + data[:end]
            rest.clear()
        rest += data[end:]
        if len(rest) > max_line_bytes:
            message = f"file: line {number} is longer than {max_line_bytes} bytes (SCOREPOOL_MAX_BODY_BYTES)"
            raise TooLarge(message, "file")
    if rest:
        yield bytes(rest)


def check_file_id(file_id: str, field: str = "id") -> None:
    """Check the form of an id before it becomes a key in Redis. Raise NotFound."""
    if not _ID.fullmatch(file_id):
        raise file_not_found(file_id, field)


def file_not_found(file_id: str, field: str = "id") -> NotFound:
    """Build the same error for a file that never existed, one that expired and one of another owner."""
    return NotFound(f"no file {wire.quote(file_id)}", field)
