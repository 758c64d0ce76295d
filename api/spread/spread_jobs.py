"""Read jobs from the servers that have them."""

import asyncio
from collections.abc import Sequence

from scorepool import wire
from scorepool.api.http.errors import NotFound
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories.jobs import JobFilter, Jobs, created_at
from scorepool.api.repositories.pages import merge_pages
from scorepool.api.spread.parts import Parts
from scorepool.store import ServerMap


class SpreadJobs(Jobs):
    """The jobs of all servers."""

    def __init__(self, servers: ServerMap, parts: Sequence[Jobs]) -> None:
        self._parts = Parts(servers, parts)

    async def read_state(self, owner: str, job_id: str) -> wire.Job:
        return await self._parts.find(job_id, lambda jobs: jobs.read_state(owner, job_id))

    async def owner(self, job_id: str) -> str | None:
        async def owner_of(jobs: Jobs) -> str:
            if (found := await jobs.owner(job_id)) is None:
                raise NotFound("this server does not have the job", "id")
            return found

        try:
            return await self._parts.find(job_id, owner_of)
        except NotFound:
            return None

    async def read_with_expiry(self, owner: str, job_id: str, held: HeldResults) -> tuple[wire.Job, float]:
        return await self._parts.find(job_id, lambda jobs: jobs.read_with_expiry(owner, job_id, held))

    async def read_request(self, owner: str, job_id: str) -> wire.Request | None:
        return await self._parts.find(job_id, lambda jobs: jobs.read_request(owner, job_id))

    async def read_kept_body(self, job_id: str) -> bytes | None:
        for index in self._parts.servers.search_order(job_id):
            if (found := await self._parts.all[index].read_kept_body(job_id)) is not None:
                return found
        return None

    async def page(self, owner: str, cursor: str | None, limit: int, wanted: JobFilter | None = None) -> wire.JobPage:
        """Merge a page of each server. A server that does not answer makes it fail: no job is left out in silence."""
        pages = await asyncio.gather(*(jobs.page(owner, cursor, limit, wanted) for jobs in self._parts.all))
        found, next_cursor = merge_pages([(page.jobs, page.next_cursor) for page in pages], limit, created_at)
        return wire.JobPage(jobs=found, next_cursor=next_cursor)
