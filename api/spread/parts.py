"""Find the server of a job."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from scorepool.api.http.errors import NotFound
from scorepool.store import ServerMap

T = TypeVar("T")
R = TypeVar("R")


class Parts(Generic[T]):
    """The repositories of one kind, one for each server, in the order of the map."""

    def __init__(self, servers: ServerMap, parts: Sequence[T]) -> None:
        self.servers = servers
        self.all = parts

    async def find(self, job_id: str, act: Callable[[T], Awaitable[R]]) -> R:
        """Act on the server that a job's id names, then on the others, until one has the job. Raises NotFound."""
        absent: NotFound | None = None
        for index in self.servers.search_order(job_id):
            try:
                return await act(self.all[index])
            except NotFound as error:
                absent = absent or error
        assert absent is not None
        raise absent
