"""Owners' files in Redis: what a batch reads and what it writes.

They lie there and not on this process's disk, because any API process, on any machine, may be asked for them and may
drive the batch; and because a batch's output then grows in the same transaction in which its progress is noted. The
price is memory of Redis: a part is whole lines, about PART_BYTES of them, compressed (JSONL to a fourth or less).
"""

import logging
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from starlette.concurrency import run_in_threadpool

from scorepool import store, wire
from scorepool.api.dialects.openai.files import FILE_KEPT_S, FileObject, Purpose
from scorepool.api.http.errors import Conflict, NotFound, TooLarge
from scorepool.api.repositories import decode
from scorepool.api.repositories.pages import page_of

logger = logging.getLogger(__name__)

PART_BYTES = 256 * 1024
UPLOAD_TTL_S = 3600  # of parts whose upload was cut off
COMPRESSION = 1  # zlib's fastest: half of what is gained by its best at a tenth of the time


class Upload(Protocol):
    async def read(self, size: int) -> bytes: ...


class Files:
    def __init__(self, redis: Redis, settings: store.Settings) -> None:
        self._redis = redis
        self._settings = settings

    async def store(self, owner: str, id: str, filename: str, upload: Upload, ttl_s: int) -> FileObject:  # noqa: A002
        """For a batch to read. Raises TooLarge."""
        num_bytes, num_parts, key = 0, 0, store.Keys.file_parts(id)
        async for part in whole_lines(upload, self._settings.max_body_bytes):
            packed = await run_in_threadpool(pack, part)
            async with self._redis.pipeline() as pipeline:
                pipeline.hset(key, str(num_parts), packed)
                pipeline.expire(key, UPLOAD_TTL_S)
                await pipeline.execute()
            num_bytes, num_parts = num_bytes + len(part), num_parts + 1
        async with self._redis.pipeline() as pipeline:
            file = publish(pipeline, owner, id, filename, "batch", num_bytes, ttl_s)
            await pipeline.execute()
        return file

    async def read(self, owner: str, id: str) -> FileObject:  # noqa: A002
        """Raises NotFound."""
        [file] = await self._read(owner, [id])
        if file is None:
            raise absent(id)
        return file

    async def part(self, id: str, number: int) -> bytes | None:  # noqa: A002
        """None behind the last, and where it cannot be read."""
        packed: Any = await self._redis.hget(store.Keys.file_parts(id), str(number))
        try:
            return None if packed is None else await run_in_threadpool(zlib.decompress, packed)
        except zlib.error:
            logger.warning("part %d of the file %s cannot be read", number, id)
            return None

    async def parts(self, id: str) -> AsyncIterator[bytes]:  # noqa: A002
        number = 0
        while (part := await self.part(id, number)) is not None:
            yield part
            number += 1

    async def page(
        self, owner: str, after: str | None, limit: int, purpose: str | None, newest_first: bool
    ) -> tuple[list[FileObject], bool]:
        """Raises BadRequest."""

        async def read(ids: Sequence[str]) -> list[FileObject | None]:
            found = await self._read(owner, ids)
            return [file if file and purpose in (None, file.purpose) else None for file in found]

        return await page_of(self._redis, store.Keys.files_of(owner), after, limit, read, newest_first)

    async def delete(self, owner: str, id: str) -> None:  # noqa: A002
        """Raises NotFound, Conflict."""
        key = store.Keys.file(id)

        async def write(pipeline: Pipeline) -> None:
            known: Any = await pipeline.hgetall(key)
            if known.get(b"owner") != owner.encode():
                raise absent(id)
            if any(field.startswith(b"batch:") for field in known):
                raise Conflict("a batch that has not ended reads this file; cancel that first", "id")
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.unlink(key, store.Keys.file_parts(id))
            pipeline.zrem(store.Keys.files_of(owner), id)

        await self._redis.transaction(write, key)

    async def _read(self, owner: str, ids: Sequence[str]) -> list[FileObject | None]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id_ in ids:
                pipeline.hmget(store.Keys.file(id_), "owner", "file")
            rows = await decode.replies(pipeline)
        return [
            decode.message(row[1], FileObject, "msgpack") if row and row[0] == owner.encode() else None for row in rows
        ]


def publish(
    pipeline: Pipeline,
    owner: str,
    id: str,  # noqa: A002
    filename: str,
    purpose: Purpose,
    num_bytes: int,
    ttl_s: int,
) -> FileObject:
    """Make a file of parts that are there. Ids of files that expired leave the owner's list with this one's coming."""
    now = time.time()
    file = FileObject(
        id=id,
        bytes=num_bytes,
        created_at=int(now),
        expires_at=int(now) + ttl_s,
        filename=filename,
        purpose=purpose,
    )
    pipeline.hset(store.Keys.file(id), mapping={"owner": owner, "file": wire.encode(file)})
    pipeline.expire(store.Keys.file(id), ttl_s)
    pipeline.expire(store.Keys.file_parts(id), ttl_s)
    pipeline.zadd(store.Keys.files_of(owner), {id: now})
    pipeline.zremrangebyscore(store.Keys.files_of(owner), "-inf", now - 2 * FILE_KEPT_S)
    return file


def pack(part: bytes) -> bytes:
    return zlib.compress(part, COMPRESSION)


async def whole_lines(upload: Upload, max_line_bytes: int) -> AsyncIterator[bytes]:
    """Parts of about PART_BYTES that end with a line. Raises TooLarge."""
    held = bytearray()
    while data := await upload.read(PART_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield bytes(held) + data[:end]
            held.clear()
        held += data[end:]
        if len(held) > max_line_bytes:
            raise TooLarge(f"file: a line is longer than {max_line_bytes} bytes, this server's limit", "file")
    if held:
        yield bytes(held)


def absent(id: str, field: str = "id") -> NotFound:  # noqa: A002
    """The same for a file that never was, one that expired and one of another owner."""
    return NotFound(f"no file {id[:64]!r}", field)
