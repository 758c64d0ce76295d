"""autobatcher, unmodified and installed by hand, gives answers to its callers before their batch ends."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

NUM_SHORT, NUM_LONG = 100, 40


@pytest.mark.soak
def test_the_first_futures_resolve_before_the_batch_ends(root: Path, tmp_path: Path):
    autobatcher = pytest.importorskip("autobatcher", minversion="0.12", reason="pip install autobatcher")
    events: list[Any] = []

    async def run(url: str) -> dict[int, float]:
        client = autobatcher.BatchOpenAI(
            api_key="unused",
            base_url=f"{url}/v1",
            batch_size=NUM_SHORT + NUM_LONG,
            completion_window="24h",
            poll_interval_seconds=0.2,
            batch_event_handler=events.append,
        )

        async def ask(number: int) -> float:
            answer = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"Hi {number}"}],
                max_tokens=4 if number < NUM_SHORT else 400,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage.completion_tokens == (4 if number < NUM_SHORT else 400)
            return time.monotonic()

        times = await asyncio.gather(*(ask(number) for number in range(NUM_SHORT + NUM_LONG)))
        await client.close()
        return dict(enumerate(times))

    environ = {"SCOREPOOL_PORT": str(free_port())}
    demo = f"demo={root}/scorepool/models/demo"
    with Stack([demo], state=tmp_path, environ=environ, logs=tmp_path / "logs") as stack:
        times = asyncio.run(run(stack.url))
    last = max(times.values())
    num_early = sum(at < last - 0.2 for at in times.values())  # in an earlier look at the batch
    print(f"{num_early} of {len(times)} answers before the last look, the first {last - min(times.values()):.1f} s")
    assert num_early >= NUM_SHORT
