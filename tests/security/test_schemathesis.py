"""schemathesis over the whole OpenAPI: no 5xx, and no answer that is not declared.

Skipped where it is not installed: `pip install schemathesis --constraint constraints.txt`. It takes two minutes.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis
from rq.exceptions import NoSuchJobError
from rq.job import JobStatus

import wire
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, is_ready, running

CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
]


@contextmanager
def refusing(worker: FakeWorker) -> Iterator[None]:
    """Every job ends at once: nobody waits for the answer of a synchronous route."""
    is_over = threading.Event()

    def refuse() -> None:
        while not is_over.wait(0.02):
            for id_ in worker.waiting():
                with suppress(NoSuchJobError):  # it was deleted meanwhile
                    worker.end(id_, wire.Failure(code="invalid", message="no"), JobStatus.FAILED)

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.timeout(400)
def test_whatever_the_schema_allows_is_answered_as_it_says(root: Path, redis: Redis, redis_url: str, tmp_path: Path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    worker = FakeWorker(redis)
    worker.show_card()
    redis.persist("scorepool:card:w1")
    redis.zadd("scorepool:models", {"w1": time.time() + 3600})
    with running(root, redis_url, tmp_path / "log") as (http, _), refusing(worker):
        eventually(lambda: is_ready(http))
        tool, document = Path(sys.executable).with_name("schemathesis"), f"{http.base_url}/openapi.json"
        options = ["--phases", "coverage,fuzzing", "--max-examples", "40", "--continue-on-failure", "--no-color"]
        command = [str(tool), "run", document, *options, "--checks", ",".join(CHECKS)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "Traceback" not in (tmp_path / "log").read_text()
