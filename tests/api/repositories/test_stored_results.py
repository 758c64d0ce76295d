"""Objects are counted before they are in memory, and those that no job needs are deleted, whatever the others do."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from scorepool import store, wire
from scorepool.api.http.errors import TooManyResults
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.store.object_store import ObjectStore
from scorepool.store.result_store import ResultStoreError, object_path, path_of_lease
from scorepool.wire.stored_result import StoredResult, to_frames
from tests.api.fake_worker import RESULT

pytestmark = pytest.mark.anyio


async def test_an_object_that_cannot_be_deleted_keeps_no_other(redis: Redis, redis_url: str, tmp_path: Path):
    objects = ObjectStore(tmp_path.as_uri())
    stuck, *others = leases = [f"{letter * 32}:{letter * 8}" for letter in "abc"]
    for lease_key in leases:
        objects.put(path_of_lease(lease_key), b"a result")
    (tmp_path / path_of_lease(stuck)).unlink()
    os.makedirs(tmp_path / path_of_lease(stuck) / "a folder in its place")
    redis.zadd(store.Keys.stored_results, dict.fromkeys([*leases, f"{'x' * 200}:y", "no lease"], 1))

    async with AsyncRedis.from_url(redis_url) as connection:
        with pytest.raises(ResultStoreError):
            await StoredResults(connection, objects).delete_unneeded(objects)

    assert not [lease_key for lease_key in others if (tmp_path / path_of_lease(lease_key)).exists()]
    assert redis.zrange(store.Keys.stored_results, 0, -1) == [stuck.encode()]


class CountedChunks(ObjectStore):
    """A folder whose chunks are counted."""

    num_bytes = 0

    async def open(self, path: str) -> tuple[int, AsyncIterator[bytes]]:
        size, chunks = await super().open(path)
        return size, self._counted(chunks)

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.num_bytes += len(chunk)
            yield chunk


async def test_a_large_first_frame_is_counted_before_it_is_in_memory(redis_url: str, tmp_path: Path):
    objects, job_id = CountedChunks(tmp_path.as_uri()), "ab" * 16
    packed = wire.PackedColumns(lengths=[2**22], token_ids=bytearray(2**24))
    path = object_path(job_id, "e1")
    first, *others = to_frames(replace(RESULT, packed=packed), path)
    body = b"".join([first, *others])
    objects.put(path, body)
    stored = StoredResult(execution="e1", num_bytes=len(body), num_sequences=len(RESULT.sequences))
    counted: list[int] = []

    def refuse(num_bytes: int) -> None:
        counted.append(num_bytes)
        raise TooManyResults("too many")

    async with AsyncRedis.from_url(redis_url) as connection:
        results = StoredResults(connection, objects)
        with pytest.raises(TooManyResults):
            await results.begin(job_id, stored, refuse)
        assert 0 < objects.num_bytes < len(body) / 4
        assert counted == [len(first) - 12]

        found, frames = await results.begin(job_id, stored, counted.append)
        assert [found, *[frame async for frame in frames]] == [frame[12:] for frame in (first, *others)]
    assert set(counted) == {len(found)}
