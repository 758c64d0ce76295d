"""A job that was submitted by an AsyncClient."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from scorepool import wire

if TYPE_CHECKING:
    from scorepool.sdk.async_jobs import AsyncJobs


class AsyncJobHandle:
    """A job that was submitted. Iterate over it to get its tokens as they are generated, if it has `stream`."""

    def __init__(self, client: "AsyncJobs", job_id: str) -> None:
        self.id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"<job {self.id} at {self._client.url}>"

    async def result(self, timeout_s: float | None = None) -> wire.Result:
        """Wait for the result, however often the API restarts meanwhile.

        Raises JobFailed; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return await self._client.result(self.id, timeout_s=timeout_s)

    async def status(self) -> wire.Job:
        """Return the job as it is, without waiting. Raises ScorepoolError, Unreachable."""
        return await self._client.job(self.id)

    async def cancel(self) -> wire.Job:
        """Cancel the job. Raises ScorepoolError, Unreachable."""
        return await self._client.cancel(self.id)

    async def delete(self) -> None:
        """Delete the job, which has ended, and its result. Raises ScorepoolError, Unreachable."""
        await self._client.delete(self.id)

    def detach(self) -> Self:
        """Let the job go on when the client is closed. Return it."""
        self._client.detach(self.id)
        return self

    def __aiter__(self) -> AsyncIterator[wire.TokenDelta]:
        return self._client.events(self.id)

    def progress(self, timeout_s: float | None = None) -> AsyncIterator[wire.Progress]:
        """Yield how many items of a score or classify job are done, about once a second until it ends.

        Raises JobFailed if the job fails; JobTimeout after `timeout_s`; Unreachable if the API was away at that time.
        """
        return self._client.progress(self.id, timeout_s=timeout_s)


def id_of(job: AsyncJobHandle | str) -> str:
    """Return the id of a job."""
    return job if isinstance(job, str) else job.id
