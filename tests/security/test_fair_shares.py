"""One key's jobs, however many, large and urgent, do not stop those of another."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scorepool import Client, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.api.conftest import ALICE, BOB, KEYS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def stack(root: Path, tmp_path: Path) -> Iterator[Stack]:
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_API_KEYS": KEYS,
        "SCOREPOOL_MAX_BATCH_TOKENS": "256",
        "SCOREPOOL_DRAIN_TIMEOUT_S": "0.1",
    }
    model = f"demo={root / 'scorepool' / 'models' / 'demo'}"
    with Stack([model], state=tmp_path, environ=environ, logs=tmp_path / "logs") as stack:
        yield stack


def large_job(number: int) -> wire.Score:
    """Return a job of 100,000 tokens, of which no two sequences share a prefix."""
    prompts = ([number + 1, 1 + index // 50, 1 + index % 50, *range(1, 200)] for index in range(500))
    items = [wire.ScoreItem(prompt=prompt, completion=[7, 9]) for prompt in prompts]
    return wire.Score(model="demo", items=items, priority="high")


def test_a_flood_of_large_high_jobs_lets_the_normal_jobs_of_another_key_through(stack: Stack):
    """Each of the first key's jobs fills the batch for many steps, and more of them wait than the worker has rows."""
    with Client(stack.url, ALICE) as alice, Client(stack.url, BOB) as bob:
        ids = [alice.submit(large_job(number)) for number in range(10)]
        while alice.job(ids[0]).status == "queued":
            pass

        small = [bob.submit(wire.Score(model="demo", items=[wire.ScoreItem(prompt=[1, 2], completion=[3])]))]
        for _ in range(2):
            small[-1].result()
            small.append(bob.submit(wire.Score(model="demo", items=[wire.ScoreItem(prompt=[1, 2], completion=[3])])))
        small[-1].result()

        ends = [alice.job(job_id).ended_at for job_id in ids]
        for job in (bob.job(one.id) for one in small):
            num_ended = sum(job.created_at <= end < (job.ended_at or 0.0) for end in ends if end)
            assert num_ended <= 1, "the second key's jobs waited for large jobs of the first"
