"""The methods of Client for files and batches: those of AsyncBatches, blocking."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from scorepool import wire
from scorepool.sdk.async_batches import AsyncBatches
from scorepool.sdk.blocking import Blocking


class Batches(Blocking):
    """Upload files, run batches and read their output."""

    _async: AsyncBatches

    def upload_file(
        self, file: str | Path | bytes, *, filename: str | None = None, expires_after_s: int | None = None
    ) -> wire.FileObject:
        """Upload the input of a batch: a path, or the content. It is read while it is sent.

        It is kept for 30 days, or for `expires_after_s`. Raises OSError, ScorepoolError, Unreachable.
        """
        return self._run(self._async.upload_file(file, filename=filename, expires_after_s=expires_after_s))

    def files(
        self,
        *,
        purpose: wire.Purpose | None = None,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        limit: int = 50,
    ) -> wire.FilePage:
        """Return a page of files, by default newest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.files(purpose=purpose, order=order, after=after, limit=limit))

    def file(self, file_id: str) -> wire.FileObject:
        """Return a file's name, size and times. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.file(file_id))

    def file_lines(self, file_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the lines of a file after the first `offset`, without their ends, also if the API restarts meanwhile.

        The output of a running batch ends after the lines that are written so far. Raises ScorepoolError; Unreachable
        when the API is away for longer than the client's `retry_s`.
        """
        groups = self._iterate(self._async._line_groups(file_id, offset))
        return (line for group in groups for line in group)

    def delete_file(self, file_id: str) -> None:
        """Delete a file that no batch uses. Raises ScorepoolError, Unreachable."""
        self._run(self._async.delete_file(file_id))

    def create_batch(
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
        return self._run(
            self._async.create_batch(
                input_file_id,
                endpoint,
                completion_window=completion_window,
                metadata=metadata,
                output_expires_after_s=output_expires_after_s,
            )
        )

    def batches(self, *, after: str | None = None, limit: int = 20) -> wire.BatchPage:
        """Return a page of batches, newest first. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.batches(after=after, limit=limit))

    def batch(self, batch_id: str) -> wire.Batch:
        """Return a batch as it is. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.batch(batch_id))

    def wait_for_batch(self, batch_id: str, *, timeout_s: float | None = None) -> wire.Batch:
        """Return a batch when it has ended, whatever its status, however often the API restarts meanwhile.

        Raises ScorepoolError; BatchTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._run(self._async.wait_for_batch(batch_id, timeout_s=timeout_s))

    def cancel_batch(self, batch_id: str) -> wire.Batch:
        """Cancel a batch: its output so far can be read. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.cancel_batch(batch_id))
