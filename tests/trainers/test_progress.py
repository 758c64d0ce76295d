"""A score job of many items reports how many are done, while it runs."""

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from scorepool import Client, Score, ScoreItem, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

LENGTH = 400
NUM_ITEMS = 200


def request() -> Score:
    items = [
        ScoreItem(prompt=[5 + (place * 7 + row) % 900 for place in range(LENGTH)], completion=[7, 8])
        for row in range(NUM_ITEMS)
    ]
    return Score(model="demo", items=items)


def revive(stack: Stack) -> None:
    killed = stack.pid("worker demo")
    while stack.pid("worker demo") == killed:
        time.sleep(0.1)
        stack.restart_dead()


def check(found: list[wire.Progress]) -> None:
    """Check the progress of one run."""
    assert {(one.num_items, one.num_tokens) for one in found} == {(NUM_ITEMS, NUM_ITEMS * (LENGTH + 2))}
    for one, later in pairwise(found):
        assert one.num_items_done <= later.num_items_done
        assert one.num_tokens_done < later.num_tokens_done
    for one in found:
        assert one.num_items_done * (LENGTH + 2) <= one.num_tokens_done <= one.num_tokens


@pytest.mark.soak
def test_progress_is_reported_through_a_takeover(root: Path, tmp_path: Path):
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_MAX_BATCH_TOKENS": "128"}
    model = f"demo={root / 'scorepool' / 'models' / 'demo'}"
    with Stack([model], state=tmp_path, environ=environ) as stack, Client(stack.url) as client:
        job = client.submit(request())
        began_at, found, times = time.monotonic(), [], []
        for progress in job.progress(timeout_s=300):
            times.append(time.monotonic() - began_at)
            found.append(progress)
            if len(found) == 1:
                os.kill(stack.pid("worker demo"), signal.SIGKILL)
                threading.Thread(target=revive, args=(stack,)).start()
        result = job.result(timeout_s=300)
        short = list(client.submit(Score(model="demo", items=[ScoreItem(prompt="a", completion="b")])).progress())

    runs = sorted({progress.run for progress in found})
    assert len(runs) == 2
    assert [progress.run for progress in found] == sorted(progress.run for progress in found)
    for run in runs:
        check([progress for progress in found if progress.run == run])
    assert len(found) <= times[-1] + 2
    assert len(result.sequences) == NUM_ITEMS
    assert short == []
