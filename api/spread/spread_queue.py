"""Submit each job to the server of its model; cancel and delete it where it is."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from scorepool import wire
from scorepool.api.http.errors import Unavailable
from scorepool.api.repositories.queue import Queue, Submitted, idempotency_key_reused
from scorepool.api.repositories.readiness import PATIENCE_S
from scorepool.api.spread.parts import Parts
from scorepool.api.spread.spread_models import SpreadModels
from scorepool.store import ServerMap
from scorepool.store.server_map import HOME

logger = logging.getLogger(__name__)


class SpreadQueue(Queue):
    """The queues of all servers."""

    def __init__(self, servers: ServerMap, parts: Sequence[Queue], models: SpreadModels) -> None:
        self._parts = Parts(servers, parts)
        self._models = models

    async def submit(
        self, owner: str, requests: Sequence[wire.Request], job_ids: Sequence[str], *args: Any, **kwargs: Any
    ) -> list[Submitted]:
        servers = {self._parts.servers.of_model(request.model) for request in requests}
        if len(servers) > 1:  # admission refused this, but a model may have changed its name since
            raise Unavailable("the models of this request are on several Redis servers; send it again")
        queue = self._parts.all[servers.pop()] if servers else self._parts.all[HOME]
        return await queue.submit(owner, requests, job_ids, *args, **kwargs)

    async def job_ids(self, owner: str, key: str | None, count: int | None, model: str | None = None) -> list[str]:
        """Return ids that name the server of the model. Raises Conflict if another server has jobs under the key."""
        index = HOME if model is None else await self._models.server_of(model)
        if key is not None and model is not None:  # the id of a batch names no server
            others = [other for other in range(len(self._parts.all)) if other != index]
            if any(await asyncio.gather(*(self._has(other, owner, key, count) for other in others))):
                raise idempotency_key_reused()
        return await self._ids_on(index, owner, key, count)

    async def _ids_on(self, index: int, owner: str, key: str | None, count: int | None) -> list[str]:
        server = self._parts.servers.servers[index]
        return [server.stamp(job_id) for job_id in await self._parts.all[index].job_ids(owner, key, count)]

    async def _has(self, index: int, owner: str, key: str, count: int | None) -> bool:
        """True if a server has a job of a submission under the key; False if it does not answer soon."""
        if index in self._models.errors:
            return False
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._parts.all[index].have_any(await self._ids_on(index, owner, key, count))
        except (RedisError, OSError) as error:
            logger.warning("a server cannot say whether an Idempotency-Key is known to it: %r", error)
            return False

    async def was_submitted(self, requests: Sequence[wire.Request], job_ids: Sequence[str]) -> bool:
        return await self._parts.all[self._parts.servers.of_job(job_ids[0])].was_submitted(requests, job_ids)

    async def cancel(self, owner: str, job_id: str) -> None:
        await self._parts.find(job_id, lambda queue: queue.cancel(owner, job_id))

    async def delete(self, owner: str, job_id: str) -> None:
        await self._parts.find(job_id, lambda queue: queue.delete(owner, job_id))
