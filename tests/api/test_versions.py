"""Workers newer than the API, as during an upgrade: the API ignores fields that it does not know."""

import msgspec
import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import PROVENANCE, RESULT, FakeWorker

pytestmark = pytest.mark.anyio


async def test_records_of_a_newer_worker_are_read(serving: Serving, redis: Redis, worker: FakeWorker):
    card = wire.ServedModel(
        id="newer", stamp=PROVENANCE, context_length=64, vocab_size=1000, self_test="passed", worker="w2", created=1
    )
    redis.zadd(store.Keys.models, {"w2": 1e11})
    redis.set(store.Keys.served_model("w2"), with_unknown_fields(card))
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score(model="newer"))).json()["id"]
        worker.end(job_id)
        redis.set(store.Keys.outcome(job_id), with_unknown_fields(RESULT))
        job = (await http.get(f"/v1/jobs/{job_id}")).json()

    assert (job["status"], job["result"]["sequences"][0]["token_ids"]) == ("finished", [1, 2])


def with_unknown_fields(message: object) -> bytes:
    """Encode a message with an unknown field added at every level."""

    def add(value: object) -> object:
        if isinstance(value, dict):
            inner = {name: below if name == "versions" else add(below) for name, below in value.items()}
            return inner | {"unknown": {"of": "a newer release"}}
        return [add(below) for below in value] if isinstance(value, list) else value

    return msgspec.msgpack.encode(add(msgspec.msgpack.decode(wire.encode(message))))
