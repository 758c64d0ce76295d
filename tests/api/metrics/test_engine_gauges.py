"""/metrics shows what engines compute, one row per model and host whatever the workers are called."""

import re

import msgspec
import pytest
from redis import Redis

from scorepool import wire
from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

RATES = wire.EngineRates(
    prompt_tokens_per_s=300.0,
    cached_tokens_per_s=100.0,
    scored_tokens_per_s=50.0,
    generated_tokens_per_s=20.0,
    steps_per_s=10.0,
    busy=0.5,
    step_s=0.05,
    rows_per_step=8.0,
    batch_fill=0.25,
    acceptance=0.75,
)


def load(rates: wire.EngineRates | None, cached_tokens: int = 100) -> wire.EngineLoad:
    return wire.EngineLoad(
        running_rows=1,
        max_running_rows=32,
        cached_tokens=cached_tokens,
        max_cached_tokens=1000,
        prefix_bytes=5,
        prefix_disk_bytes=7,
        rates=rates,
    )


def gauges(text: str) -> dict[tuple[str, str], float]:
    found = re.findall(r"^scorepool_engine_(\w+){([^}]*)} (\S+)$", text, re.MULTILINE)
    return {(name, labels): float(value) for name, labels, value in found}


async def test_workers_of_one_host_are_one_row(serving: Serving, redis: Redis):
    idle = msgspec.structs.replace(RATES, busy=0.0, step_s=None, rows_per_step=None, batch_fill=None, acceptance=None)
    strained = msgspec.structs.replace(load(idle, 300), budget=0.25, strains=["heat", "battery"], is_loaded=False)
    workers = {"a": ("m1", load(RATES)), "b": ("m1", strained), "c": ("m2", load(None)), "d": ("m2", None)}
    for name, (host, shown) in workers.items():
        redis.hset(f"rq:worker:{name}", "hostname", host)
        FakeWorker(redis, name=name).register(load=shown)
    async with serving() as http:
        shown_gauges = gauges((await http.get("/metrics")).text)
        listed = (await http.get("/v1/models")).json()["models"]

    m1, m2 = 'host="m1",model="demo"', 'host="m2",model="demo"'
    kinds = {"prompt": 600.0, "cached": 200.0, "scored": 100.0, "generated": 40.0}
    assert shown_gauges == {
        **{("tokens_per_second", f'host="m1",kind="{kind}",model="demo"'): value for kind, value in kinds.items()},
        ("steps_per_second", m1): 20.0,
        ("busy_ratio", m1): 0.25,
        ("step_seconds", m1): 0.05,
        ("step_rows", m1): 8.0,
        ("batch_fill_ratio", m1): 0.25,
        ("acceptance_ratio", m1): 0.75,
        ("kv_cache_ratio", m1): 0.2,
        ("prefix_cache_hit_ratio", m1): 0.25,
        **{
            ("prefix_cache_bytes", f'host="{host}",model="demo",tier="{tier}"'): number
            for host, tier, number in (
                *(("m1", "memory", 10.0), ("m1", "disk", 7.0)),  # two workers, and the files that both see
                *(("m2", "memory", 5.0), ("m2", "disk", 7.0)),
            )
        },
        ("kv_cache_ratio", m2): 0.1,
        ("budget_ratio", m1): 0.25,
        ("budget_ratio", m2): 1.0,
        ("loaded_workers", m1): 1.0,  # of two
        ("loaded_workers", m2): 1.0,
        **{
            ("strained", f'host="{host}",model="demo",reason="{reason}"'): float(host == "m1" and reason != "memory")
            for host in ("m1", "m2")
            for reason in ("heat", "memory", "battery")
        },
    }
    assert {one["worker"]: one["load"] and one["load"]["rates"] is None for one in listed}["a"] is False
    assert "m1" not in str(listed)  # hosts are for operators
