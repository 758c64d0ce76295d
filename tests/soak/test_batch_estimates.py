"""The estimated end of a batch, once a tenth of its lines have ended: with lines of equal and of mixed lengths.

The first batch meets a worker that has just started and is slower for some seconds. So it lasts minutes.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

NUM_LINES = int(os.environ.get("SOAK_ESTIMATED_LINES", "9000"))
MAX_TOKENS = {"equal": [16], "mixed": [4, 16, 60]}  # of a line, drawn
MAX_WRONG_TOTAL = 0.2  # share of the batch's whole time
ESTIMATES_FROM = 0.1  # share of the lines
POLL_S = 0.25

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def client(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port())}
    model = f"demo={root}/scorepool/models/demo"
    with Stack([model], state=folder / "s", environ=environ, logs=folder / "l") as stack, Client(stack.url) as client:
        yield client


@pytest.mark.parametrize("lengths", MAX_TOKENS)
def test_the_end_of_a_batch_is_estimated(client: Client, lengths: str):
    file = client.upload_file(input_lines(MAX_TOKENS[lengths]))
    batch = client.create_batch(file.id, "/v1/completions")
    estimates = []  # share of the lines that have ended, unix s
    while batch.status in ("validating", "in_progress", "finalizing"):
        if batch.estimated_end_at is not None:
            estimates.append((batch.request_counts.completed / NUM_LINES, batch.estimated_end_at))
        time.sleep(POLL_S)
        batch = client.batch(batch.id)
    ended_at = time.time()
    assert batch.request_counts.completed == NUM_LINES
    assert batch.in_progress_at is not None
    total_s = ended_at - batch.in_progress_at
    errors = [(share, (end - ended_at) / total_s) for share, end in estimates if share >= ESTIMATES_FROM]
    worst = max(errors, key=lambda error: abs(error[1]))
    print(f"{lengths}: {NUM_LINES} lines in {total_s:.1f} s; the estimated time was wrong by {worst[1]:.1%} at most,")
    print(f"when {worst[0]:.0%} had ended; of {len(errors)} estimates {ESTIMATES_FROM:.0%} or later")
    assert len(errors) >= 10
    assert abs(worst[1]) < MAX_WRONG_TOTAL


def input_lines(max_tokens: list[int]) -> bytes:
    """Draw lines that share ten prompts' beginnings."""
    draw = random.Random(1)
    bodies = (
        {
            "model": "demo",
            "prompt": f"prompt {draw.randrange(10)} " * 20 + str(number),
            "max_tokens": draw.choice(max_tokens),
            "ignore_eos": True,
        }
        for number in range(NUM_LINES)
    )
    lines = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
