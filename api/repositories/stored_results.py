"""Results in the result store: read them, and delete those that no job needs any more.

Every API process looks for such objects; Redis tells each of them at most once in RETRY_S.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.streamed_job import StoredResultBroken
from scorepool.api.repositories import decode
from scorepool.store.outage import Outage
from scorepool.store.result_store import ResultMissing, ResultStore, ResultStoreError, object_path, path_of_lease
from scorepool.store.scripts import load
from scorepool.wire.stored_result import FrameReader, StoredResult, from_frames

logger = logging.getLogger(__name__)
CHECK_EVERY_S = 2.0
MAX_CHECKED = 100  # objects, by one call of the script
CHECK_AGAIN_S = 600  # an object that is needed
RETRY_S = 60  # until one whose deletion failed is found again
DAMAGED_S = 60.0  # for which an object that was found damaged is not read again


class Damaged(StoredResultBroken):
    """The object of a result is absent, or is not what was written."""


class StoredResults:
    """The objects of one deployment. Without a result store, none can be read."""

    def __init__(self, redis: Redis, result_store: ResultStore | None) -> None:
        self._redis = redis
        self._store = result_store
        self._check = redis.register_script(load("check_stored.lua"))
        self._task: asyncio.Task[None] | None = None
        self._damaged: dict[str, float] = {}  # executions whose objects were damaged after their start, and until when

    def start(self) -> None:
        """Begin to delete."""
        if self._store is not None:
            self._task = asyncio.create_task(self._delete_forever(self._store), name="stored-results")

    async def close(self) -> None:
        """Stop deleting."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def read(self, job_id: str, stored: StoredResult) -> list[bytes]:
        """Read the frames of a result. Raises Damaged, Unavailable."""
        return [frame async for frame in self.frames(job_id, stored)]

    async def begin(
        self, job_id: str, stored: StoredResult, count: Callable[[int], None]
    ) -> tuple[bytes, AsyncGenerator[bytes]]:
        """Read the first frame; return it and the others. Both raise Damaged and Unavailable.

        `count` gets the size of the first frame when a chunk of it is there, maybe several times. If it raises, the
        rest is not read.
        """
        frames = self.frames(job_id, stored, count)
        try:
            first = await anext(frames)
        except StopAsyncIteration:
            raise Damaged("it is empty") from None
        count(len(first))
        return first, frames

    async def frames(
        self, job_id: str, stored: StoredResult, count_first: Callable[[int], None] = lambda num_bytes: None
    ) -> AsyncGenerator[bytes]:
        """Read the frames of a result, one after the other. Raises Damaged, Unavailable."""
        if self._store is None:
            raise Unavailable(
                "the result of this job is in a result store, and this API process has none: set "
                "SCOREPOOL_RESULT_STORE to that of the workers"
            )
        if self._damaged.get(stored.execution, 0.0) > time.monotonic():
            raise Damaged("it is damaged, as another request found")
        has_begun = False
        try:
            path = object_path(job_id, stored.execution)
            reader = FrameReader(path, stored.num_bytes)
            num_bytes, chunks = await self._store.open(path)
            if num_bytes != stored.num_bytes:
                raise Damaged(f"it has {num_bytes} bytes instead of {stored.num_bytes}")
            async for chunk in chunks:
                for body in reader.feed(chunk):
                    yield body
                    has_begun = True
                if not has_begun:
                    count_first(reader.begun_bytes)
            reader.check_end()
        except ResultMissing:
            raise Damaged("it is not there") from None
        except (wire.Invalid, ValueError) as error:
            if has_begun:  # the reply may be cut off, and the client asks again
                self._remember(stored.execution)
            raise Damaged(str(error)) from None
        except ResultStoreError as error:
            logger.warning("the result store does not answer: %s", error)
            raise Unavailable("the result store does not answer; the result is there when it does") from None

    def _remember(self, execution: str) -> None:
        now_s = time.monotonic()
        self._damaged = {known: until_s for known, until_s in self._damaged.items() if until_s > now_s}
        self._damaged[execution] = now_s + DAMAGED_S

    async def _delete_forever(self, result_store: ResultStore) -> None:
        outage = Outage(logger)
        while True:
            try:
                has_more = await self.delete_unneeded(result_store)
                outage.ended("unneeded results are deleted again")
            except (RedisError, OSError, ResultStoreError) as error:
                outage.failed("unneeded results are not deleted: %s", error)
                has_more = False
            if not has_more:
                await asyncio.sleep(CHECK_EVERY_S)

    async def delete_unneeded(self, result_store: ResultStore) -> bool:
        """Delete objects that no job needs; return whether there may be more.

        Raises RedisError, and ResultStoreError if one could not be deleted.
        """
        found: Any = await self._check(args=[MAX_CHECKED, CHECK_AGAIN_S, RETRY_S])
        failed: ResultStoreError | None = None
        for lease_key in found:
            with suppress(ValueError):  # another client's ids, which name no object
                try:
                    await result_store.delete(path_of_lease(decode.text(lease_key)))
                except ResultStoreError as error:
                    failed = error  # the script finds it again; the others are deleted now
                    continue
            await self._redis.zrem(store.Keys.stored_results, lease_key)
        if failed is not None:
            raise failed
        return bool(found)


def read_frames(frames: list[bytes]) -> wire.Result:
    """Decode a result. Raises Damaged."""
    try:
        return from_frames(frames)
    except wire.Invalid as error:
        raise Damaged(str(error)) from None
