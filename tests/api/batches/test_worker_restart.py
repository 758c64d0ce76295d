"""A batch whose model's only worker is away for seconds: it waits, and so does a batch that is created meanwhile."""

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.api.test_process import eventually, running
from tests.worker.conftest import Workers, workers  # noqa: F401 - a fixture

GAP_S = 6.0
NUM_LINES = 40


def jsonl() -> bytes:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 2}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(NUM_LINES)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def start(http: httpx.Client) -> str:
    file = http.post("/v1/files", files={"file": ("a.jsonl", jsonl())}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).json()["id"])


def test_batches_survive_a_restart_of_the_only_worker(
    workers: Workers,  # noqa: F811
    redis_url: str,
    root: Path,
    tmp_path: Path,
):
    with running(root, redis_url, tmp_path / "api.log") as (http, _):

        def read(batch_id: str) -> dict[str, Any]:
            return dict(http.get(f"/v1/batches/{batch_id}").json())

        killed = workers.start("--name", "first", SCOREPOOL_MODEL="demo=fake")
        eventually(lambda: bool(http.get("/v1/models").json()["data"]))
        before = start(http)
        eventually(lambda: read(before)["status"] == "in_progress")
        killed.kill()
        killed.wait()
        eventually(lambda: http.get("/v1/models").json()["data"] == [])
        during = start(http)
        time.sleep(GAP_S)
        assert read(during)["status"] == "in_progress"
        workers.start("--name", "second", SCOREPOOL_MODEL="demo=fake")
        for batch_id in (before, during):
            eventually(lambda batch_id=batch_id: read(batch_id)["status"] not in ("in_progress", "finalizing"))
            batch = read(batch_id)
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
