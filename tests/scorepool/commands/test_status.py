"""The state of a worker, as `scorepool status`, `scorepool top` and the page say it."""

from typing import Any

import pytest

from scorepool import wire
from scorepool.commands.status import worker_state

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
