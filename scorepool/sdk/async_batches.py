"""The methods of AsyncClient for files and batches."""

import asyncio
import io
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, Literal

import httpx

from scorepool import wire
from scorepool.sdk import calls
from scorepool.sdk.connection import AsyncConnection, lines_of
from scorepool.sdk.errors import BatchTimeout, Unreachable

POLL_S = 2.0  # between two looks at a batch
RESUME_S = 0.2  # until a file that was cut off is read on
_ENDED: tuple[wire.BatchStatus, ...] = ("completed", "failed", "expired", "cancelled")


class AsyncBatches:
    """Upload files, run batches and read their output."""

    _connection: AsyncConnection

    async def upload_file(
        self, file: str | Path | bytes, *, filename: str | None = None, expires_after_s: int | None = None
    ) -> wire.FileObject:
        """Upload the input of a batch: a path, or the content. It is read while it is sent.

        It is kept for 30 days, or for `expires_after_s`. Raises OSError, ScorepoolError, Unreachable.
        """
        name = filename or ("input.jsonl" if isinstance(file, bytes) else Path(file).name)
        with _opened(file) as content:
            return await self._connection.send(calls.upload_file(name, content, expires_after_s))

    async def files(
        self,
        *,
        purpose: wire.Purpose | None = None,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        limit: int = 50,
    ) -> wire.FilePage:
        """Return a page of files, by default newest first. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.files(purpose, order, after, limit))

    async def file(self, file_id: str) -> wire.FileObject:
        """Return a file's name, size and times. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.file(file_id))

    async def file_lines(self, file_id: str, *, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yield the lines of a file after the first `offset`, without their ends, also if the API restarts meanwhile.

        The output of a running batch ends after the lines that are written so far. Raises ScorepoolError; Unreachable
        when the API is away for longer than the client's `retry_s`.
        """
        async with aclosing(self._line_groups(file_id, offset)) as groups:
            async for group in groups:
                for line in group:
                    yield line

    async def _line_groups(self, file_id: str, offset: int) -> AsyncGenerator[list[bytes]]:
        """Yield lines, as many at a time as arrive together."""
        clock = asyncio.get_running_loop().time
        waiting_since = clock()
        while True:
            call = calls.file_content(file_id, offset)
            try:
                async with self._connection.stream(call) as reply:
                    async for group in lines_of(reply):
                        offset += len(group)
                        yield group
                        waiting_since = clock()  # whatever time the caller took
                return
            except httpx.TransportError as error:
                if (seconds := clock() - waiting_since) > self._connection.retry_s:
                    raise Unreachable(self._connection.url, seconds, error, call.name) from error
            await asyncio.sleep(RESUME_S)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file that no batch uses. Raises ScorepoolError, Unreachable."""
        await self._connection.send(calls.delete_file(file_id))

    async def create_batch(
        self,
        input_file_id: str,
        endpoint: wire.LineEndpoint,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after_s: int | None = None,
    ) -> wire.Batch:
        """Run the requests of a file. It goes on when the client is closed.

        `completion_window` is minutes, hours or days: 30m, 24h, 7d. The output is kept for 30 days, or for
        `output_expires_after_s`. Raises ValueError, ScorepoolError, Unreachable.
        """
        batch = wire.CreateBatch(
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=None if metadata is None else dict(metadata),
            output_expires_after=None
            if output_expires_after_s is None
            else wire.ExpiresAfter(anchor="created_at", seconds=output_expires_after_s),
        )
        return await self._connection.send(calls.create_batch(batch))

    async def batches(self, *, after: str | None = None, limit: int = 20) -> wire.BatchPage:
        """Return a page of batches, newest first. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.batches(after, limit))

    async def batch(self, batch_id: str) -> wire.Batch:
        """Return a batch as it is. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.batch(batch_id))

    async def wait_for_batch(self, batch_id: str, *, timeout_s: float | None = None) -> wire.Batch:
        """Return a batch when it has ended, whatever its status, however often the API restarts meanwhile.

        Raises ScorepoolError; BatchTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        clock = asyncio.get_running_loop().time
        deadline = math.inf if timeout_s is None else clock() + timeout_s
        while True:
            found = await self._connection.send(calls.batch(batch_id), max(0.0, deadline - clock()))
            if found.status in _ENDED:
                return found
            if clock() >= deadline:
                raise BatchTimeout(found, timeout_s or 0.0, self._connection.url)
            await asyncio.sleep(max(0.0, min(POLL_S, deadline - clock())))

    async def cancel_batch(self, batch_id: str) -> wire.Batch:
        """Cancel a batch: its output so far can be read. Raises ScorepoolError, Unreachable."""
        return await self._connection.send(calls.cancel_batch(batch_id))


def _opened(file: str | Path | bytes) -> BinaryIO:
    return io.BytesIO(file) if isinstance(file, bytes) else Path(file).open("rb")
