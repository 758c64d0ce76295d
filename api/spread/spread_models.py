"""Read which models the workers of all servers serve."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.shared_read import SharedRead
from scorepool.store import ServerMap
from scorepool.store.clock import clock_s
from scorepool.store.outage import Outage

logger = logging.getLogger(__name__)
LATE_S = 0.25  # until a read of one server goes on alone, and what it found the last time is used
PROBE_S = 0.05  # the same, for a server that did not answer the last time


class SpreadModels(Models):
    """The models of all servers. Those of a server that does not answer are unknown, not absent."""

    def __init__(self, servers: ServerMap, parts: Sequence[Models], reach: Reach) -> None:
        self._servers = servers
        self._parts = parts
        self._reach = reach
        self._live: list[wire.ServedModel] = []
        self._recent: list[wire.ServedModel] = []
        self._read_at = float("-inf")
        self._shared = SharedRead(self._read)
        self._outages = [Outage(logger) for _ in parts]
        self._probes: dict[int, asyncio.Task[list[wire.ServedModel]]] = {}  # reads under way, by server
        self._strays: set[str] = set()  # workers that a line was logged about
        self.errors: dict[int, RedisError] = {}  # of the last read, by the index of the server
        self.live_on: list[list[wire.ServedModel]] = [[] for _ in parts]  # what `live` found on each server

    async def _read(self) -> list[wire.ServedModel]:
        """Read all servers. Raises RedisError if none answers."""
        await asyncio.gather(*map(self._read_part, range(len(self._parts))))
        return self._merge()

    def _merge(self) -> list[wire.ServedModel]:
        """Put together what is known of each server. Raises RedisError if none answers."""
        if len(self.errors) == len(self._parts):
            raise next(iter(self.errors.values()))
        live = sorted((model for each in self.live_on for model in each), key=lambda model: (model.id, model.worker))
        self._live = [model for model in live if model.takes_jobs]
        answering = (index for index in range(len(self._parts)) if index not in self.errors)
        recent = (model for index in answering for model in self._own(index, self._parts[index].recent))
        self._recent = sorted(recent, key=lambda model: model.id)
        self._read_at = clock_s()
        return live

    async def _read_part(self, index: int) -> None:
        """Read the live models of a server. After the first read, nobody waits long for one that answers late."""
        before = self._probes.get(index)
        if before is not None and before.done():  # after the last look
            self._end_probe(index)
        if index not in self._probes:
            self._probes[index] = asyncio.create_task(self._parts[index].read_now())
        is_late = index in self.errors or self._probes[index] is before
        patience_s = PROBE_S if is_late else LATE_S if self._parts[index].was_read else None
        await self._wait_for(index, patience_s)
        if index in self._probes and self._reach.is_silent(index):
            self._fail(index, RedisTimeoutError("it has not answered for seconds"))

    async def _wait_for(self, index: int, patience_s: float | None) -> None:
        """Take what a read of a server finds, if it ends soon enough."""
        if (probe := self._probes.get(index)) is None:
            return
        await asyncio.wait([probe], timeout=patience_s)
        if probe.done() and self._probes.get(index) is probe:
            self._end_probe(index)

    def _end_probe(self, index: int) -> None:
        """Take what a read of a server has found: no models if it failed."""
        setting, outage = self._servers.servers[index].setting, self._outages[index]
        try:
            live = self._probes.pop(index).result()
        except (RedisError, OSError) as error:
            self._fail(index, error)
            return
        self.errors.pop(index, None)
        outage.ended(f"the Redis of {setting} answers again")
        self.live_on[index] = self._own(index, live)

    def _fail(self, index: int, error: RedisError | OSError) -> None:
        """Serve no models of a server that does not answer."""
        self.errors[index] = error if isinstance(error, RedisError) else RedisConnectionError(str(error))
        self._outages[index].failed("the Redis of %s does not answer: %s", self._servers.servers[index].setting, error)
        self.live_on[index] = []

    async def _wait_for_late(self, indices: Iterable[int]) -> None:
        """Wait for reads of servers that are under way, until they find something or fail. Raises RedisError."""
        late = [index for index in indices if index in self._probes and index not in self.errors]
        if late:
            await asyncio.gather(*(self._wait_for(index, None) for index in late))
            self._merge()

    def _own(self, index: int, models: Iterable[wire.ServedModel]) -> list[wire.ServedModel]:
        """Return those that the map puts on this server: jobs of others do not come to it."""
        own = []
        for model in models:
            if self._servers.of_model(model.id) == index:
                own.append(model)
            elif model.worker not in self._strays:
                self._strays.add(model.worker)
                logger.warning(
                    "the worker %s serves %s on the Redis of %s and gets no jobs: the map puts that model on another",
                    model.worker,
                    model.id,
                    self._servers.servers[index].setting,
                )
        return own

    async def now_s(self) -> float:
        """Return the unix time of home's clock, or of that of another server if home has not answered yet."""
        await self.live()
        return await next(part for part in self._parts if part.was_read).now_s()

    async def serving(self, names: Iterable[str]) -> dict[str, list[wire.ServedModel]]:
        """As of one server. Raises RedisError for a name that a server which does not answer may serve."""
        found = await super().serving(names)
        unknown = [name for name, served in found.items() if not served]
        await self._wait_for_late(index for name in unknown for index in self._may_serve(name))
        for name in unknown:
            found[name] = self._named(name)
            errors = [error for index in self._may_serve(name) if (error := self.errors.get(index)) is not None]
            if errors and not found[name]:
                raise errors[0]
        return found

    async def unreachable(self, names: Iterable[str]) -> dict[str, int]:
        await self.live()
        unknown = {name for name in names if not self._named(name)}
        await self._wait_for_late(index for name in unknown for index in self._may_serve(name))
        silent = {
            name: next((index for index in self._may_serve(name) if index in self.errors), None)
            for name in unknown
            if not self._named(name)
        }
        return {name: index for name, index in silent.items() if index is not None}

    async def find(self, name: str | None) -> wire.ServedModel:
        if name is None:
            await self.live()
            await self._wait_for_late(range(len(self._parts)))
            if self.errors:  # the only one that is known need not be the only one
                raise next(iter(self.errors.values()))
        return await super().find(name)

    async def workers_of(self, model: str) -> list[wire.ServedModel]:
        await self.read_now()
        await self._wait_for_late([self._servers.of_model(model)])
        return [each for each in self._live if each.id == model]

    async def server_of(self, name: str) -> int:
        """Return the index of the server of a model, an alias or an adapter."""
        served = (await self.serving([name]))[name]
        return self._servers.of_model(served[0].id if served else name)

    def _may_serve(self, name: str) -> Sequence[int]:
        """Return the servers that may serve a name which none is known to serve: the map's if it has it, else all."""
        return [self._servers.of_model(name)] if self._servers.is_mapped(name) else range(len(self._parts))

    async def close(self) -> None:
        await super().close()
        await tasks.cancel_and_wait(list(self._probes.values()))
        for part in self._parts:
            await part.close()
