"""The state of a worker, as `scorepool status`, `scorepool top` and the page say it."""

from typing import Any, cast

import pytest

from scorepool import wire
from scorepool.commands.status import read_status, worker_state
from scorepool.sdk import Client

STAMP = wire.Provenance(
    model="demo",
    fingerprint="f" * 64,
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu",
    versions={},
)


def served(self_test: str = "passed", **load: Any) -> wire.ServedModel:
    return wire.ServedModel(
        id="demo",
        stamp=STAMP,
        context_length=100,
        vocab_size=50,
        self_test=self_test,
        worker="mac",
        load=wire.EngineLoad(running_rows=0, max_running_rows=32, cached_tokens=0, max_cached_tokens=9, **load),
    )


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        (served(), "ok"),
        (served(is_loaded=False), "idle, its weights dropped"),
        (served(budget=0.25, strains=["heat", "battery"]), "slowed to 25% by heat, battery"),
        (served(self_test="one row at a time"), "one row at a time"),
    ],
)
def test_the_state_says_what_slows_the_next_jobs(worker: wire.ServedModel, state: str):
    assert worker_state(worker) == state


class Api:
    """What a client reads of an API."""

    url = "http://mac"

    def __init__(self, metrics: str) -> None:
        self.metrics = lambda: metrics

    def models(self) -> list[wire.ServedModel]:
        return [served()]


QUEUE = (
    'scorepool_queue_jobs{queue="demo",state="queued"} 1.0\nscorepool_queue_jobs{queue="demo",state="started"} 0.0\n'
)


@pytest.mark.parametrize(
    ("metrics", "redis", "headline", "is_problem"),
    [
        (f"scorepool_redis_up 1.0\n{QUEUE}", "up", "ready", False),
        (f"scorepool_redis_up 0.0\n{QUEUE}", "partly", "ready, but some of its Redis servers do not answer", False),
        ("scorepool_redis_up 0.0\n", "down", "Redis does not answer the API", True),
    ],
)
def test_one_of_several_redis_servers_suffices(metrics: str, redis: str, headline: str, is_problem: bool):
    shown = read_status(cast("Client", Api(metrics)))
    assert (shown.redis, shown.problem is not None, len(shown.workers)) == (redis, is_problem, int(redis != "down"))
    assert shown.headline.startswith(headline)
