"""Submit each job to the server of its model; cancel and delete it where it is."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from scorepool import wire
from scorepool.api.http.errors import Unavailable
from scorepool.api.repositories.queue import Queue, Submitted, idempotency_key_reused
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.readiness import PATIENCE_S
from scorepool.api.spread.parts import Parts
from scorepool.api.spread.spread_models import SpreadModels
from scorepool.store import ServerMap
from scorepool.store.server_map import HOME

logger = logging.getLogger(__name__)


class SpreadQueue(Queue):
    """The queues of all servers."""

    def __init__(self, servers: ServerMap, parts: Sequence[Queue], models: SpreadModels, reach: Reach) -> None:
        self._parts = Parts(servers, parts, reach)
        self._models = models
        self._reach = reach

    async def submit(
        self,
        owner: str,
        requests: Sequence[wire.Request],
        job_ids: Sequence[str],
        submission_fingerprint: str | None = None,
        result_ttl_s: int | None = None,
        batch: str | None = None,
        **options: Any,
    ) -> list[Submitted]:
        servers = {self._parts.servers.of_model(request.model) for request in requests} or {HOME}
        if len(servers) > 1:  # admission refused this, but a model may have changed its name since
            raise Unavailable("the models of this request are on several Redis servers; send it again")
        index = servers.pop()
        if job_ids and batch is None:  # a batch has looked for its jobs on all servers
            index = await self._server_of_known(job_ids, index)
        return await self._parts.on(
            index,
            lambda queue: queue.submit(
                owner, requests, job_ids, submission_fingerprint, result_ttl_s, batch, **options
            ),
        )

    async def _server_of_known(self, job_ids: Sequence[str], index: int) -> int:
        """Return the server that has these jobs, whose script compares the bodies; `index` if it is not another one.

        The last id is of a job that was asked for: that of the base of a compare job names no server. Raises Conflict
        if the other server has some of them, because the rest would wait there for ever.
        """
        hinted = self._parts.servers.of_job(job_ids[-1])
        known = 0 if hinted == index else await self._parts.on(hinted, lambda queue: queue.count_known(job_ids))
        if 0 < known < len(job_ids):
            raise idempotency_key_reused()
        return hinted if known else index

    async def job_ids(self, owner: str, key: str | None, count: int | None, model: str | None = None) -> list[str]:
        """Return ids that name the server of the model, or those that jobs under the key have, wherever they are."""
        index = HOME if model is None else await self._models.server_of(model)
        if key is None or model is None:  # the id of a batch names no server
            return await self._new_ids(index, owner, key, count)
        ids, *others = await asyncio.gather(
            self._ids_on(index, owner, key, count),
            *(self._known_ids(other, owner, key, count) for other in range(len(self._parts.all)) if other != index),
        )
        return next(filter(None, others), ids)

    async def _new_ids(self, index: int, owner: str, key: str | None, count: int | None) -> list[str]:
        ids = await self._parts.on(index, lambda queue: queue.job_ids(owner, key, count))
        return list(map(self._parts.servers.servers[index].stamp, ids))

    async def _ids_on(self, index: int, owner: str, key: str, count: int | None) -> list[str]:
        """Return the ids of jobs under the key on one server, in the form that those have which are there."""
        ids = await self._parts.on(index, lambda queue: queue.job_ids(owner, key, count))
        server = self._parts.servers.servers[index]
        former = list(map(server.stamp_otherwise, ids))
        if await self._parts.on(index, lambda queue: queue.count_known(former)):
            return former
        return list(map(server.stamp, ids))

    async def _known_ids(self, index: int, owner: str, key: str, count: int | None) -> list[str]:
        """Return the ids of jobs under the key if the server has any; none if it does not answer soon."""
        if index in self._models.errors or self._reach.is_silent(index):
            return []
        try:
            async with asyncio.timeout(PATIENCE_S):
                ids = await self._ids_on(index, owner, key, count)
                return ids if await self._parts.on(index, lambda queue: queue.count_known(ids)) else []
        except (RedisError, OSError) as error:
            logger.warning("a server cannot say whether an Idempotency-Key is known to it: %r", error)
            return []

    async def was_submitted(self, requests: Sequence[wire.Request], job_ids: Sequence[str]) -> bool:
        own = await self._models.server_of(requests[0].model)
        for index in dict.fromkeys((own, self._parts.servers.of_job(job_ids[0]))):
            if await self._parts.on(index, lambda queue: queue.was_submitted(requests, job_ids)):
                return True
        return False

    async def cancel(self, owner: str, job_id: str) -> None:
        await self._parts.find(job_id, lambda queue: queue.cancel(owner, job_id))

    async def delete(self, owner: str, job_id: str) -> None:
        await self._parts.find(job_id, lambda queue: queue.delete(owner, job_id))
