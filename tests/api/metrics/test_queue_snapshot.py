"""/metrics shows the state of the queue, and the dashboard and alerts use only metrics that exist."""

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from redis import Redis
from rq.job import JobStatus
from rq.utils import now, utcformat

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio


async def test_metrics_show_ages_outcomes_workers_and_deliveries(serving: Serving, worker: FakeWorker, redis: Redis):
    redis.sadd("rq:workers:demo", "rq:worker:w1", "rq:worker:dead")
    redis.hset("rq:worker:w1", "last_heartbeat", utcformat(now()))
    redis.hset(store.Keys.outcome_counts, mapping={"result": 7, "numeric": 2, "made-up": 5})
    redis.hset(store.Keys.prefix_events, mapping={"memory:hits": 4, "disk:evictions": 2, "made-up": 5})
    redis.hset(store.Keys.checkpoint_counts, mapping={"saved": 9, "restored": 3})
    async with serving() as http:
        hook = {"webhook": "https://hooks.example/"}
        ids = [(await http.post("/v1/jobs", json=score(**hook))).json()["id"] for _ in range(3)]
        worker.end(ids[0])
        worker.end(ids[1], wire.Failure(code="numeric", message="NaN"), JobStatus.FAILED)
        worker.fail_delivery(store.Keys.delivery(ids[1]))
        redis.hset(f"rq:job:{ids[2]}", "enqueued_at", "2026-01-01T00:00:00.000000Z")
        await http.post(f"/v1/jobs/{(await http.post('/v1/jobs', json=score())).json()['id']}/cancel")
        redis.zadd(store.RqKeys.registry("deferred", store.WEBHOOKS), {"wh_a": 1, "wh_b": 1})  # in owners' backlogs
        text = (await http.get("/metrics")).text

    assert 'scorepool_outcomes_total{code="result"} 7.0' in text
    assert 'scorepool_outcomes_total{code="canceled"} 1.0' in text
    assert 'scorepool_outcomes_total{code="timeout"} 0.0' in text
    assert 'scorepool_prefix_cache_lookups_total{outcome="hit",tier="memory"} 4.0' in text
    assert 'scorepool_prefix_cache_lookups_total{outcome="miss",tier="disk"} 0.0' in text
    assert 'scorepool_prefix_cache_evictions_total{tier="disk"} 2.0' in text
    assert 'scorepool_checkpoint_rows_total{event="restored"} 3.0' in text
    assert "made-up" not in text
    assert 'scorepool_webhook_deliveries{state="queued"} 3.0' in text
    assert 'scorepool_webhook_deliveries{state="failed"} 1.0' in text
    assert 'scorepool_workers{model="demo"} 1.0' in text
    assert 'scorepool_workers{model="webhooks"} 0.0' in text
    [age] = re.findall(r'scorepool_queue_oldest_seconds{queue="demo"} (\S+)', text)
    assert float(age) == pytest.approx(time.time() - 1767225600, abs=60)
    [beat] = re.findall(r'scorepool_worker_heartbeat_age_seconds{model="demo"} (\S+)', text)
    assert float(beat) < 60


async def test_what_workers_measure_is_shown_of_each_and_by_model(serving: Serving, redis: Redis):
    near = wire.WorkerLink(round_trip_s=0.001, jobs_per_s=8.0, tokens_per_s=800.0, lease_s=20.0, drain_s=0.5)
    far = wire.WorkerLink(
        round_trip_s=0.25,
        upload_bytes_per_s=1e6,
        jobs_per_s=2.0,
        tokens_per_s=100.0,
        prefetch_jobs=2,
        lease_s=60.0,
        drain_s=4.0,
    )
    FakeWorker(redis, name="near").register(link=near)
    FakeWorker(redis, name="far").register(link=far)
    FakeWorker(redis, name="older").register()
    FakeWorker(redis, model="new", name="starting").register(link=wire.WorkerLink(lease_s=20.0))
    async with serving() as http:
        listed = (await http.get("/v1/models")).json()["models"]
        text = (await http.get("/metrics")).text

    assert {model["worker"]: model["link"] for model in listed} == {
        "near": msgspec.to_builtins(near),
        "far": msgspec.to_builtins(far),
        "older": None,
        "starting": msgspec.to_builtins(wire.WorkerLink(lease_s=20.0)),
    }
    shown = re.findall(
        r"^scorepool_(\w+_per_second|worker_(?:round_trip|lease|drain)_seconds){model=\"(\w+)\"} (\S+)",
        text,
        re.MULTILINE,
    )
    assert {(name, model): float(value) for name, model, value in shown} == {
        ("jobs_per_second", "demo"): 10.0,
        ("tokens_per_second", "demo"): 900.0,
        ("worker_round_trip_seconds", "demo"): 0.25,
        ("worker_lease_seconds", "demo"): 60.0,
        ("worker_lease_seconds", "new"): 20.0,
        ("worker_drain_seconds", "demo"): 4.0,
    }


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bscorepool_\w+", expression))


def expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        return own + [text for value in node.values() for text in expressions(value)]
    return [text for value in node for text in expressions(value)] if isinstance(node, list) else []


@pytest.mark.parametrize("file", ["deploy/grafana.json", "deploy/alerts.yml"])
async def test_dashboard_and_alerts_use_only_metrics_that_exist(
    serving: Serving, worker: FakeWorker, root: Path, file: str
):
    async with serving() as http:
        await http.post("/v1/jobs", json=score())
        text = (await http.get("/metrics")).text
    exposed = set(re.findall(r"^# TYPE (scorepool_\w+)", text, re.MULTILINE))
    series = exposed | {f"{name}_{part}" for name in exposed for part in ("bucket", "count", "sum")}
    content = (root / file).read_text()
    asked = expressions(json.loads(content) if file.endswith("json") else yaml.safe_load(content))
    assert len(asked) >= 8
    for expression in asked:
        assert names_in(expression), expression
        assert names_in(expression) <= series, expression
        assert expression.count("(") == expression.count(")")
