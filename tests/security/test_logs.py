"""Logs of real processes at INFO contain no prompt, completion, key, secret or query string of a URL."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from scorepool.local.demo import free_port
from scorepool.local.stack import webhook_command
from tests.api.conftest import ALICE, KEYS, SECRET, bearer, score
from tests.api.test_process import eventually, is_ready
from tests.worker.conftest import Workers, outcome
from tests.worker.receiver import receiver

PROMPT, COMPLETION, CHAT = "what-the-prompt-says", "what-the-completion-says", "what-the-chat-says"


@pytest.fixture(params=["text", "json"])
def environ(request: pytest.FixtureRequest, redis_url: str, root: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SCOREPOOL_", "RQ_"))},
        "PYTHONPATH": str(root),
        "SCOREPOOL_REDIS_URL": redis_url,
        "RQ_REDIS_URL": redis_url,
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_API_KEYS": KEYS,
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
        "SCOREPOOL_LOG_FORMAT": request.param,
    }


@pytest.fixture
def log(root: Path, environ: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """Run the API and the webhook worker, and yield the path of their log."""
    path = tmp_path / "processes"
    with path.open("wb") as out:
        commands = [[sys.executable, "-m", "scorepool.api"], webhook_command()]
        processes = [subprocess.Popen(command, cwd=root, env=environ, stdout=out, stderr=out) for command in commands]
        yield path
        for process in processes:
            process.terminate()
            process.wait(60)


def test_logs_have_one_format_and_contain_no_secrets(
    redis: Redis, workers: Workers, environ: dict[str, str], log: Path
):
    workers.start("--name", "mac", SCOREPOOL_LEASE_S="20", SCOREPOOL_LOG_FORMAT=environ["SCOREPOOL_LOG_FORMAT"])
    jobs = [
        score(items=[{"prompt": PROMPT, "completion": COMPLETION}]),
        {"type": "generate", "model": "demo", "prompt": PROMPT + "NAN", "max_tokens": 2},
        {"type": "generate", "model": "demo", "prompt": "BUG", "max_tokens": 2},
        {"type": "generate", "model": "demo", "messages": [{"role": "user", "content": CHAT}], "max_tokens": 2},
        score(items=[{"prompt": PROMPT, "completion": COMPLETION}], typo=PROMPT),
        score(items=[{"prompt": [PROMPT], "completion": COMPLETION}]),
    ]
    url = f"http://127.0.0.1:{environ['SCOREPOOL_PORT']}"
    with receiver() as hook, httpx.Client(base_url=url, headers=bearer(ALICE), timeout=30, trust_env=False) as http:
        eventually(lambda: is_ready(http))
        eventually(lambda: http.get("/v1/models").json()["models"])
        hook.answers = [(500, {}), (204, {})]
        registered = http.post("/v1/webhooks/endpoints", json={"url": hook.url}).json()
        replies = [http.post("/v1/jobs", json=job | {"webhook": hook.url}) for job in jobs]
        http.post("/v1/jobs", content=PROMPT, headers={"Content-Type": "application/json"})
        http.get("/v1/jobs", headers={"Authorization": f"Bearer {ALICE}-mistyped"})
        ids = [reply.json()["id"] for reply in replies if reply.status_code == 202]
        eventually(lambda: all(outcome(redis, job_id) for job_id in ids))
        eventually(lambda: len(hook.received) >= 2 * len(ids))
        http.post(f"/v1/webhooks/endpoints/{registered['endpoint']['id']}/secret")

    logged = log.read_text() + workers.log
    assert len(ids) == 4
    assert "delivered to 127.0.0.1" in logged
    assert "POST /v1/jobs" in logged
    if environ["SCOREPOOL_LOG_FORMAT"] == "json":
        lines = [json.loads(line) for line in logged.splitlines()]
        about = {(line["process"].partition("[")[0], line.get("worker", "") == "mac") for line in lines}
        assert about == {("api", False), ("webhooks", False), ("worker", True)}
        for job_id in ids:
            said = [(line["process"][:3], line["message"][:5]) for line in lines if line.get("job") == job_id]
            assert {("wor", "begin"), ("wor", "ends:"), ("api", "127.0")} <= set(said)
    else:
        line = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|WARNING|ERROR) (api|worker|webhooks)\[\d+\][^:]*: |    ")
        assert [text for text in logged.splitlines() if not line.match(text)] == []
    for secret in (PROMPT, COMPLETION, CHAT, ALICE, SECRET, registered["secret"], "hush", KEYS.partition(":")[2][:64]):
        assert secret not in logged
