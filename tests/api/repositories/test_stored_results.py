"""Objects that no job needs are deleted, whatever the others do."""

import os
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from scorepool import store
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.store.object_store import ObjectStore
from scorepool.store.result_store import ResultStoreError, path_of_lease

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
