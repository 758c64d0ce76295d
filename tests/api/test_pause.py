"""The pause as the API keeps it. What workers make of it is in tests/trainers/test_pause.py."""

import pytest
from redis import Redis

from scorepool.store import Keys
from tests.api.conftest import Serving

pytestmark = pytest.mark.anyio


async def test_a_pause_outlives_the_api(serving: Serving):
    async with serving() as http:
        assert (await http.post("/pause?mode=wait")).json() == {"status": "paused"}
    async with serving() as http:
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        await http.post("/resume")
        assert (await http.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(("query", "num_told"), [("", 1), ("&clear_cache=true", 1), ("&clear_cache=false", 0)])
async def test_clear_cache_tells_workers_to_drop_the_caches_of_prompts(
    serving: Serving, redis: Redis, query: str, num_told: int
):
    async with serving() as http:
        with redis.pubsub() as pubsub:
            pubsub.subscribe(Keys.reset_prefix_cache)
            while pubsub.get_message(timeout=60) is None:
                pass
            assert (await http.post(f"/pause?mode=wait{query}")).status_code == 200
            message = pubsub.get_message(timeout=0.5)
    assert (message is not None) == bool(num_told)
