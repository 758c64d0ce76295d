"""A batch whose API and worker are killed repeatedly: every line is answered once."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from scorepool import store
from scorepool.api.batches.lines import job_id_of
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.api.dialects.test_batches import ENDED, entries, line, start

pytestmark = pytest.mark.timeout(300)
NUM_LINES = 600


@pytest.fixture
def restarting_stack(demo_folder: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack whose dead processes are restarted, as `scorepool serve` does."""
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_LEASE_S": "2"}
    stopped = threading.Event()
    with Stack([f"demo={demo_folder}"], state=tmp_path, environ=environ, logs=tmp_path / "logs") as stack:

        def revive() -> None:
            while not stopped.wait(0.1):
                stack.restart_dead()

        reviver = threading.Thread(target=revive)
        reviver.start()
        yield stack
        stopped.set()
        reviver.join()


def read_on(sdk: OpenAI, batch: Batch, answered: list[str]) -> None:
    """Append the custom_ids of the lines that were written since, as a client does that reads while the batch runs."""
    if batch.output_file_id is not None:
        query = {"offset": len(answered)}
        output = sdk.files.with_raw_response.content(batch.output_file_id, extra_query=query)
        answered += [json.loads(text)["custom_id"] for text in output.text.splitlines()]
        assert output.headers["X-Last-Line"] == str(len(answered))


def test_kill_9_of_api_and_worker_loses_no_line_and_repeats_none(restarting_stack: Stack):
    answered: list[str] = []  # as read from offsets meanwhile
    with OpenAI(base_url=f"{restarting_stack.url}/v1", api_key="unused", max_retries=20) as sdk:
        batch = start(sdk, [line(i, max_tokens=6) for i in range(NUM_LINES)])
        deadline = time.monotonic() + 200
        for victim in ("api", "worker demo", "api", "api"):
            seen = batch.request_counts.completed
            os.kill(restarting_stack.pid(victim), signal.SIGKILL)
            while batch.status not in ENDED and batch.request_counts.completed <= seen:
                assert time.monotonic() < deadline
                time.sleep(0.05)
                batch = sdk.batches.retrieve(batch.id)
                read_on(sdk, batch, answered)
        while batch.status not in ENDED:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            batch = sdk.batches.retrieve(batch.id)
            read_on(sdk, batch, answered)

        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts.completed == NUM_LINES
        assert sorted(answered) == sorted(f"line-{i}" for i in range(NUM_LINES))
        assert set(entries(sdk, batch.output_file_id)) == {f"line-{i}" for i in range(NUM_LINES)}
    with Redis.from_url(restarting_stack.redis_url) as redis:
        times_ended = Counter(fields[b"id"].decode() for _, fields in redis.xrange(store.DONE))
    assert times_ended == {job_id_of(batch.id, number, 0): 1 for number in range(1, NUM_LINES + 1)}
