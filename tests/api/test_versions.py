"""Workers of a later version than the API's, as during an upgrade: what they add is passed over."""

import msgspec
import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import RESULT, STAMP, FakeWorker

pytestmark = pytest.mark.anyio


async def test_a_later_workers_card_and_result_are_read(serving: Serving, redis: Redis, worker: FakeWorker):
    card = wire.ServedModel(
        id="later", stamp=STAMP, context_length=64, vocab_size=1000, self_test="passed", worker="w2", created=1
    )
    redis.zadd(store.Keys.models, {"w2": 1e11})
    redis.set(store.Keys.card("w2"), added(card))
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score(model="later"))).json()["id"]
        worker.end(job_id)
        redis.set(store.Keys.outcome(job_id), added(RESULT))
        job = (await http.get(f"/v1/jobs/{job_id}")).json()

    assert (job["status"], job["result"]["sequences"][0]["token_ids"]) == ("finished", [1, 2])


def added(message: object) -> bytes:
    """With fields that this version does not know, at every level."""

    def add(value: object) -> object:
        if isinstance(value, dict):
            inner = {name: below if name == "versions" else add(below) for name, below in value.items()}
            return inner | {"added": {"in": "a later version"}}
        return [add(below) for below in value] if isinstance(value, list) else value

    return msgspec.msgpack.encode(add(msgspec.msgpack.decode(wire.encode(message))))
