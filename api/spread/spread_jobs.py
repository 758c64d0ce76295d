"""Read jobs from the servers that have them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from scorepool import wire
from scorepool.api.http.errors import NotFound
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories.jobs import JobFilter, Jobs, created_at
from scorepool.api.repositories.pages import merge_pages
from scorepool.api.repositories.reach import Reach
from scorepool.api.spread.parts import Parts
from scorepool.store import ServerMap

T = TypeVar("T")


class SpreadJobs(Jobs):
    """The jobs of all servers."""

    def __init__(self, servers: ServerMap, parts: Sequence[Jobs], reach: Reach) -> None:
        self._parts = Parts(servers, parts, reach)

    async def read_state(self, owner: str, job_id: str) -> wire.Job:
        return await self._parts.find(job_id, lambda jobs: jobs.read_state(owner, job_id))

    async def owner(self, job_id: str) -> str | None:
        return await self._find_or_none(job_id, lambda jobs: jobs.owner(job_id))

    async def _find_or_none(self, job_id: str, read: Callable[[Jobs], Awaitable[T | None]]) -> T | None:
        """Return what the first server that has it reads; None if none has it."""

        async def read_or_raise(jobs: Jobs) -> T:
            if (found := await read(jobs)) is None:
                raise NotFound("this server does not have the job", "id")
            return found

        try:
            return await self._parts.find(job_id, read_or_raise)
        except NotFound:
            return None

    async def read_with_expiry(self, owner: str, job_id: str, held: HeldResults) -> tuple[wire.Job, float]:
        return await self._parts.find(job_id, lambda jobs: jobs.read_with_expiry(owner, job_id, held))

    async def read_request(self, owner: str, job_id: str) -> wire.Request | None:
        return await self._parts.find(job_id, lambda jobs: jobs.read_request(owner, job_id))

    async def read_kept_body(self, job_id: str, held: HeldResults) -> bytes | None:
        return await self._find_or_none(job_id, lambda jobs: jobs.read_kept_body(job_id, held))

    async def page(self, owner: str, cursor: str | None, limit: int, wanted: JobFilter | None = None) -> wire.JobPage:
        """Merge a page of each server. A server that does not answer makes it fail: no job is left out in silence."""
        pages = await self._parts.on_all(lambda jobs: jobs.page(owner, cursor, limit, wanted))
        found, next_cursor = merge_pages([(page.jobs, page.next_cursor) for page in pages], limit, created_at)
        return wire.JobPage(jobs=found, next_cursor=next_cursor)
