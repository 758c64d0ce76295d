"""Read which models the workers of all servers serve."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.shared_read import SharedRead
from scorepool.store import ServerMap
from scorepool.store.clock import clock_s
from scorepool.store.outage import Outage

logger = logging.getLogger(__name__)
PROBE_S = 0.05  # for a server that did not answer the last time; its read goes on


class SpreadModels(Models):
    """The models of all servers. Those of a server that does not answer are unknown, not absent."""

    def __init__(self, servers: ServerMap, parts: Sequence[Models]) -> None:
        self._servers = servers
        self._parts = parts
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
        self.live_on = await asyncio.gather(*map(self._read_part, range(len(self._parts))))
        if len(self.errors) == len(self._parts):
            raise next(iter(self.errors.values()))
        live = sorted((model for each in self.live_on for model in each), key=lambda model: (model.id, model.worker))
        self._live = [model for model in live if model.takes_jobs]
        answering = (index for index in range(len(self._parts)) if index not in self.errors)
        recent = (model for index in answering for model in self._own(index, self._parts[index].recent))
        self._recent = sorted(recent, key=lambda model: model.id)
        self._read_at = clock_s()
        return live

    async def _read_part(self, index: int) -> list[wire.ServedModel]:
        """Read the live models of a server; none if it does not answer. Nobody waits for such a server again."""
        setting, outage = self._servers.servers[index].setting, self._outages[index]
        if (before := self._probes.get(index)) is not None and before.done():  # after the last look
            del self._probes[index]
            if before.exception() is None:
                self.errors.pop(index, None)  # it answers, so it is waited for
        if index not in self._probes:
            self._probes[index] = asyncio.create_task(self._parts[index].read_now())
        probe = self._probes[index]
        await asyncio.wait([probe], timeout=PROBE_S if index in self.errors else None)
        try:
            if not probe.done():
                return []  # as the last time
            del self._probes[index]
            live = probe.result()
        except (RedisError, OSError) as error:
            self.errors[index] = error if isinstance(error, RedisError) else RedisConnectionError(str(error))
            outage.failed("the Redis of %s does not answer: %s", setting, error)
            return []
        self.errors.pop(index, None)
        outage.ended(f"the Redis of {setting} answers again")
        return self._own(index, live)

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
        for name in (name for name, served in found.items() if not served):
            if error := self._error_of(name):
                raise error
        return found

    async def find(self, name: str | None) -> wire.ServedModel:
        if name is None:
            await self.live()
            if self.errors:  # the only one that is known need not be the only one
                raise next(iter(self.errors.values()))
        return await super().find(name)

    async def server_of(self, name: str) -> int:
        """Return the index of the server of a model, an alias or an adapter."""
        served = (await self.serving([name]))[name]
        return self._servers.of_model(served[0].id if served else name)

    def _error_of(self, name: str) -> Exception | None:
        """Return the error of a server that may serve the name: its own if the map has the name, else any."""
        if any(name in server.models for server in self._servers.servers):
            return self.errors.get(self._servers.of_model(name))
        return next(iter(self.errors.values()), None)

    async def close(self) -> None:
        await super().close()
        await tasks.cancel_and_wait(list(self._probes.values()))
        for part in self._parts:
            await part.close()
