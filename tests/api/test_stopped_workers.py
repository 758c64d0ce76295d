"""A worker that a crosscheck has stopped is shown with its reason, but only the others count as serving the model."""

import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
STOPPED = wire.CrosscheckStatus(share=0.01, stopped="it differed twice")
DIFFERED = wire.CrosscheckStatus(share=0.01, difference="workers a and b differ")


async def test_models_shows_every_worker_with_what_its_crosschecks_found(serving: Serving, redis: Redis):
    FakeWorker(redis, name="a").register(crosscheck=STOPPED, context_length=99)
    FakeWorker(redis, name="b").register(crosscheck=DIFFERED)
    FakeWorker(redis, name="c").register()
    async with serving() as http:
        listed = (await http.get("/v1/models")).json()
        accepted = await http.post("/v1/jobs", json=score())
        text = (await http.get("/metrics")).text

    assert [(model["worker"], model["crosscheck"]) for model in listed["models"]] == [
        ("a", {"share": 0.01, "difference": None, "stopped": "it differed twice"}),
        ("b", {"share": 0.01, "difference": "workers a and b differ", "stopped": None}),
        ("c", None),
    ]
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("demo", 64)]
    assert accepted.status_code == 202
    assert 'scorepool_workers_stopped{model="demo"} 1.0' in text


async def test_a_model_whose_only_worker_is_stopped_is_not_served(serving: Serving, redis: Redis):
    FakeWorker(redis, name="a").register(crosscheck=STOPPED)
    async with serving() as http:
        listed = (await http.get("/v1/models")).json()
        refused = await http.post("/v1/jobs", json=score())
        waiting = await http.post("/v1/jobs", json=score(wait_for_model=True))
        single = await http.get("/v1/models/demo")
        ready = (await http.get("/readyz")).json()
        health = await http.get("/health")

    assert ([model["worker"] for model in listed["models"]], listed["data"]) == (["a"], [])
    assert (refused.status_code, waiting.status_code, single.status_code) == (404, 202, 404)
    assert ready["models"] == []
    assert health.status_code == 503


async def test_metrics_count_crosschecks_by_outcome(serving: Serving, redis: Redis):
    redis.hset(store.Keys.crosscheck_counts, mapping={"agreed": 7, "differed": 2, "made-up": 5})
    async with serving() as http:
        text = (await http.get("/metrics")).text

    for outcome, count in [("agreed", 7), ("differed", 2), ("stopped", 0)]:
        assert f'scorepool_crosschecks_total{{outcome="{outcome}"}} {count}.0' in text
    assert "made-up" not in text
