"""What docs/weights.md says of a push beyond the numbers: its wait, streams that begin anew, folders that change."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from scorepool.local.stack import Stack
from tests.api.conftest import BOB, bearer
from tests.engine.test_pushed_weights import changed_copy
from tests.tiny_models import TinyModels
from tests.worker.conftest import until

URL = "/v1/models/policy/weights"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def base(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.fixture
def bob(policy: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=policy.url, timeout=120, headers=bearer(BOB)) as http:
        yield http


def test_a_push_that_is_not_waited_for_is_202_and_serves_later(bob: httpx.Client, base: Path, tmp_path: Path):
    before = bob.get(URL).json()["version"]
    folder = changed_copy(base, tmp_path / "new", seed=31)
    answer = bob.post(URL, params={"wait": 0}, json={"path": str(folder), "label": "step 3"})
    assert answer.status_code == 202, answer.text
    assert (answer.json()["version"], answer.json()["pending"], answer.json()["state"]) == (
        before,
        before + 1,
        "loading",
    )
    until(lambda: bob.get(URL).json()["state"] == "serving", 60)
    served = bob.get(URL).json()
    assert (served["version"], served["label"], served["pending"]) == (before + 1, "step 3", None)


def test_a_stream_begins_anew_with_weights_that_restart_it(bob: httpx.Client, base: Path, tmp_path: Path):
    folder = changed_copy(base, tmp_path / "new", seed=32)
    body = {"type": "generate", "model": "policy", "prompt": [5, 6, 7], "max_tokens": 480, "n": 32, "ignore_eos": True}
    job_id = bob.post("/v1/jobs", json=body | {"stream": True}).json()["id"]
    names: list[str] = []
    with ThreadPoolExecutor(1) as pool, bob.stream("GET", f"/v1/jobs/{job_id}/events") as reply:
        for line in reply.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
                if names == ["tokens"]:
                    pushing = pool.submit(
                        httpx.post,
                        str(bob.base_url) + URL,
                        json={"path": str(folder), "on_running": "restart"},
                        headers=bearer(BOB),
                        timeout=120,
                    )
                if names[-1] == "end":
                    break
        pushed = pushing.result()
    assert pushed.status_code == 200, pushed.text
    assert names.count("restart") == 1
    assert "tokens" in names[names.index("restart") :]
    result = bob.get(f"/v1/jobs/{job_id}").json()["result"]
    assert result["stamp"]["weights_version"] == pushed.json()["version"]
    assert {len(sequence["token_ids"]) for sequence in result["sequences"]} == {480}


def test_no_stream_mixes_the_logprobs_of_two_versions_that_generate_the_same_tokens(
    bob: httpx.Client, base: Path, tmp_path: Path
):
    folder = changed_copy(base, tmp_path / "new", seed=51)
    options = {"max_tokens": 480, "n": 32, "ignore_eos": True, "temperature": 0, "logit_bias": {"9": 100}}
    body = options | {"model": "policy", "prompt": [5, 6, 7], "stream": True, "logprobs": 0}
    push = {"json": {"path": str(folder), "on_running": "restart"}, "headers": bearer(BOB), "timeout": 120}
    pushing: Future[httpx.Response] | None = None
    last_lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        while pushing is None or not pushing.done():  # a push may take longer than a job
            with bob.stream("POST", "/v1/completions", json=body) as reply:
                for line in filter(None, reply.iter_lines()):
                    pushing = pushing or pool.submit(httpx.post, str(bob.base_url) + URL, **push)
                    last_line = line
            last_lines.append(last_line)
        assert pushing.result().status_code == 200
    began_again = [line for line in last_lines if "the job began again" in line]
    assert len(began_again) == 1, last_lines
    assert {*last_lines} - {*began_again} <= {"data: [DONE]"}


@pytest.mark.soak
def test_a_worker_does_not_start_with_a_folder_whose_content_has_changed(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path
):
    folder, other = (changed_copy(base, tmp_path / f"v{seed}", seed=seed) for seed in (33, 34))
    pushed = bob.post(URL, json={"path": str(folder)})
    assert pushed.status_code == 200, pushed.text
    kept = Path(shutil.copy(folder / "model.safetensors", tmp_path / "kept"))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    os.kill(policy.pid("worker policy"), signal.SIGKILL)
    log = policy._log_path("worker policy")

    def says_so() -> bool:
        policy.restart_dead()
        return "they were changed since; push a version, or put them back" in log.read_text()

    until(says_so, 90)
    job = {"type": "score", "model": "policy", "items": [{"prompt": [5], "completion": [6]}], "wait_for_model": True}
    job_id = bob.post("/v1/jobs", json=job).json()["id"]
    shutil.copy(kept, folder / "model.safetensors")

    def is_done() -> bool:
        policy.restart_dead()
        return bob.get(f"/v1/jobs/{job_id}").json()["status"] == "finished"

    until(is_done, 120)
    stamp = bob.get(f"/v1/jobs/{job_id}").json()["result"]["stamp"]
    assert stamp["fingerprint"] == pushed.json()["fingerprint"]
