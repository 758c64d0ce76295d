"""Weights that change while two workers serve them: each result is transformers' with the weights of its stamp."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack, worker_command
from tests.engine.oracle import Oracle
from tests.engine.test_pushed_weights import broken, changed_copy
from tests.tiny_models import TinyModels
from tests.worker.conftest import until

MODEL = "policy"
URL = f"/v1/models/{MODEL}/weights"
PROMPT = list(range(5, 21))
pytestmark = pytest.mark.timeout(400)


class Fleet:
    """A stack, and a second worker of its model; folders with weights, and which of them each version is."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.folders = [base, *(changed_copy(base, folder / f"v{seed}", seed=seed) for seed in (1, 2))]
        self.paths = {0: base}  # by version
        self.environ = {
            "SCOREPOOL_PORT": str(free_port()),
            "SCOREPOOL_LEASE_S": "4",
            "OPENBLAS_NUM_THREADS": "1",
            "SCOREPOOL_MAX_RUNNING_ROWS": "8",
        }
        self.stack = Stack([f"{MODEL}={base}"], state=folder / "s", environ=self.environ, logs=folder / "logs")
        self.workers: list[subprocess.Popen[bytes]] = []
        self.oracles: dict[int, Oracle] = {}
        self._log = folder / "logs" / "second"

    def start_worker(self) -> subprocess.Popen[bytes]:
        spec = f"{MODEL}={self.folders[0]}"
        environ = {
            "SCOREPOOL_REDIS_URL": self.stack.redis_url,
            "SCOREPOOL_MODEL": spec,
            "RQ_REDIS_URL": self.stack.redis_url,
        }
        state = {"SCOREPOOL_STATE_DIR": str(self._log.parent / "state")}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                worker_command([MODEL]), env=os.environ | self.environ | environ | state, stdout=log, stderr=log
            )
        self.workers.append(process)
        return process

    def agrees(self, sequence: Any, stamp: Any) -> None:
        """Check a result against transformers with the weights of its stamp."""
        version = stamp["weights_version"]
        if version not in self.oracles:
            self.oracles[version] = Oracle(self.paths[version])
        ids = [*PROMPT, *sequence["token_ids"]]
        row = self.oracles[version].logprobs(ids)
        for place, (token_id, logprob) in enumerate(
            zip(sequence["token_ids"], sequence["logprobs"], strict=True), len(PROMPT)
        ):
            assert abs(row[place - 1][token_id] - logprob) < 1e-4


@pytest.fixture(scope="module")
def fleet(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tiny_models("llama"), tmp_path_factory.mktemp("weights"))
    with fleet.stack:
        fleet.start_worker()
        with httpx.Client(base_url=fleet.stack.url) as http:
            until(lambda: len(http.get(URL).json()["workers"]) == 2, 120)
        yield fleet
        for process in fleet.workers:
            process.kill()
            process.wait()


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.stack.url, timeout=120) as http:
        yield http


def push(http: httpx.Client, path: Path | str, **fields: Any) -> dict[str, Any]:
    answer = http.post(URL, json={"path": str(path)} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(http: httpx.Client, seed: int = 0, **fields: Any) -> dict[str, Any]:
    job = {"type": "generate", "model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": seed, "logprobs": True}
    answer = http.post("/v1/jobs", json=job | fields, headers={"Prefer": "wait=60"})
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def test_all_workers_move_and_results_name_the_version(fleet: Fleet, http: httpx.Client):
    before = http.get(URL).json()
    assert (before["version"], before["state"]) == (0, "serving")
    state = push(http, fleet.folders[1], label="step 1")
    fleet.paths[1] = fleet.folders[1]
    assert (state["version"], state["label"], state["state"]) == (1, "step 1", "serving")
    assert [worker["version"] for worker in state["workers"]] == [1, 1]
    done = generate(http)
    assert done["result"]["stamp"]["weights_version"] == 1
    assert done["result"]["stamp"]["fingerprint"] == state["fingerprint"]
    fleet.agrees(done["result"]["sequences"][0], done["result"]["stamp"])
    until(lambda: [card["stamp"]["weights_version"] for card in http.get("/v1/models").json()["models"]] == [1, 1])
    until(lambda: f'scorepool_model_weights_version{{model="{MODEL}"}} 1.0' in http.get("/metrics").text)
    assert http.get("/served-models").text.count("<td>1</td>") == 2


def test_a_file_that_is_sent_is_served_and_a_folder_with_the_same_file_has_the_same_fingerprint(
    fleet: Fleet, http: httpx.Client
):
    content = (fleet.folders[2] / "model.safetensors").read_bytes()
    headers = {"Content-Type": "application/octet-stream"}
    answer = http.post(URL, params={"label": "sent"}, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    sent = answer.json()
    assert (sent["state"], sent["label"], sent["path"]) == ("serving", "sent", None)
    result = generate(http)["result"]
    fleet.paths[sent["version"]] = fleet.folders[2]
    fleet.agrees(result["sequences"][0], result["stamp"])
    again = push(http, fleet.folders[2])
    fleet.paths[again["version"]] = fleet.folders[2]
    assert again["fingerprint"] == sent["fingerprint"]

    broken_off = http.post(URL, content=content[:-100], headers=headers)
    assert broken_off.status_code == 400
    assert "safetensors header says" in broken_off.json()["error"]["message"]
    assert http.get(URL).json()["version"] == sent["version"] + 1
    with Redis.from_url(fleet.stack.redis_url) as redis:
        assert redis.keys("scorepool:weights_upload:*") == []


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"path": "/nowhere"}, 400, "there is no folder '/nowhere' on this machine"),
        ({"path": "relative"}, 400, "expected an absolute path"),
        ({"path": "/nowhere", "version": 1}, 400, "version: expected more than"),
        ({"path": "/nowhere", "version": 0}, 400, "version"),
        ({"path": "/nowhere", "on_running": "never"}, 400, "on_running"),
        ({}, 400, "path"),
    ],
)
def test_bad_pushes_are_refused_by_name_and_what_served_serves_on(
    http: httpx.Client, body: dict[str, Any], status: int, says: str
):
    before = http.get(URL).json()
    answer = http.post(URL, json=body)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    after = http.get(URL).json()
    for name in ("version", "fingerprint", "pending", "workers"):
        assert after[name] == before[name]
    assert generate(http)["result"]["stamp"]["weights_version"] == before["version"]


def test_weights_with_nan_are_refused(fleet: Fleet, http: httpx.Client, tmp_path: Path):
    before = http.get(URL).json()
    nan = broken(fleet.folders[0], tmp_path / "nan", lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    answer = http.post(URL, json={"path": str(nan)})
    assert answer.status_code == 400
    assert "the checkpoint's model.norm.weight holds NaN" in answer.json()["error"]["message"]
    after = http.get(URL).json()
    assert (after["version"], after["pending"], after["state"]) == (before["version"], None, "serving")
    assert after["failed"] == before["version"] + 1
    nan.joinpath("model.safetensors").write_bytes((fleet.folders[0] / "model.safetensors").read_bytes())
    again = push(http, nan)  # the same version, from the same folder
    assert (again["version"], again["failed"]) == (before["version"] + 1, None)
    fleet.paths[again["version"]] = fleet.folders[0]


def test_a_model_that_nobody_serves_has_no_weights(http: httpx.Client):
    assert http.get("/v1/models/none/weights").status_code == 404
    assert http.post("/v1/models/none/weights", json={"path": "/x"}).status_code == 404


@pytest.mark.soak
def test_two_hundred_jobs_over_five_reloads_are_transformers_with_the_weights_of_their_stamps(
    fleet: Fleet, http: httpx.Client
):
    first = http.get(URL).json()["version"]
    versions: list[int] = []

    def run(index: int) -> dict[str, Any]:
        extra = {"recompute": True} if index % 5 == 0 else {}
        with httpx.Client(base_url=fleet.stack.url, timeout=200) as client:
            return generate(client, seed=index, max_tokens=24, ignore_eos=True, **extra)

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(run, index) for index in range(200)]
        for number in range(5):
            until(lambda number=number: sum(job.done() for job in jobs) >= 30 * (number + 1), 200)
            source = fleet.folders[number % 3]
            state = push(http, source, on_running="restart" if number % 2 else "finish")
            fleet.paths[state["version"]] = source
            versions.append(state["version"])
        results = [job.result()["result"] for job in jobs]
    assert versions == list(range(versions[0], versions[0] + 5))
    seen = {result["stamp"]["weights_version"] for result in results}
    assert seen <= {first, *versions}
    assert len(seen) >= 4
    for result in results:
        fleet.agrees(result["sequences"][0], result["stamp"])
        assert (result["sequences"][0].get("recompute_gap") or 0) < 1e-4


def test_a_job_waits_for_the_version_that_it_asks_for_while_others_go_on(fleet: Fleet, http: httpx.Client):
    version = http.get(URL).json()["version"]
    body = {"type": "generate", "model": MODEL, "prompt": PROMPT, "max_tokens": 4, "logprobs": True}
    waiting = [http.post("/v1/jobs", json=body | {"if_weights": version + 1}).json()["id"] for _ in range(20)]
    for seed in range(10):
        assert generate(http, seed=seed, if_weights=version)["result"]["stamp"]["weights_version"] == version
    states = [http.get(f"/v1/jobs/{job_id}").json()["status"] for job_id in waiting]
    assert not {"finished", "failed"} & {*states}
    state = push(http, fleet.folders[1])
    fleet.paths[version + 1] = fleet.folders[1]
    assert state["version"] == version + 1
    for job_id in waiting:
        job = http.get(f"/v1/jobs/{job_id}", params={"wait": 60}).json()
        assert job["result"]["stamp"]["weights_version"] == version + 1
        fleet.agrees(job["result"]["sequences"][0], job["result"]["stamp"])


def test_a_job_for_a_version_that_is_gone_fails_by_name(http: httpx.Client):
    version = http.get(URL).json()["version"]
    failure = generate(http, if_weights=version - 1)["failure"]
    assert (failure["code"], failure["field"]) == ("weights_gone", "if_weights")
    assert failure["message"] == (
        f"if_weights: expected version {version} of the weights, which serves, or a later one, found {version - 1}"
    )


ROUTES = [
    ("/v1/completions", {"model": MODEL, "prompt": [PROMPT, PROMPT], "max_tokens": 2}),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 2}),
    ("/inference/v1/generate", {"model": MODEL, "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_replies_of_dialects_name_the_version_and_refuse_one_that_is_gone(
    http: httpx.Client, route: str, body: dict[str, Any]
):
    version = http.get(URL).json()["version"]
    assert version > 0
    assert http.post(route, json=body).json()["weights_version"] == version
    asked = http.post(route, json=body | {"if_weights": version})
    assert (asked.status_code, asked.json().get("weights_version")) == (200, version), asked.text
    streamed = http.post(route, json=body | {"if_weights": version, "stream": True})
    assert streamed.text.count(f'"weights_version":{version}') == (2 if route == "/v1/completions" else 1)
    for more in ({}, {"stream": True}):
        gone = http.post(route, json=body | {"if_weights": version - 1} | more)
        assert gone.status_code == 400, gone.text  # OpenAI's clients send what gets 409 again
        error = gone.json()["error"]
        assert (error["code"], error["param"]) == ("weights_gone", "if_weights")
        assert f"expected version {version} of the weights, which serves, or a later one" in error["message"]
    refused = http.post(route, json=body | {"if_weights": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "if_weights")


def test_a_request_of_a_dialect_waits_for_the_version_that_it_asks_for(fleet: Fleet, http: httpx.Client):
    version = http.get(URL).json()["version"]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "if_weights": version + 1}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(http.post, "/v1/completions", json=body)
        until(lambda: any(job["status"] == "queued" for job in http.get("/v1/jobs").json()["jobs"]), 60)
        assert not asked.done()
        push(http, fleet.folders[2])
        reply = asked.result(120)
    fleet.paths[version + 1] = fleet.folders[2]
    assert (reply.status_code, reply.json()["weights_version"]) == (200, version + 1)


def test_the_routes_of_sglang_and_vllm_change_weights_and_name_them(fleet: Fleet, http: httpx.Client):
    body = {"model_path": str(fleet.folders[2]), "weight_version": "step 7", "abort_all_requests": True}
    answer = http.post("/update_weights_from_disk", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"]
    version = http.get(URL).json()["version"]
    fleet.paths[version] = fleet.folders[2]
    result = generate(http)["result"]
    assert result["stamp"]["weights_version"] == version
    fleet.agrees(result["sequences"][0], result["stamp"])
    for route in ("/weight_info", "/get_weight_version"):
        assert http.get(route).json() == {"weight_version": "step 7"}
    renamed = http.post("/update_weight_version", json={"new_version": "best"}).json()
    assert (renamed["success"], renamed["new_version"]) == (True, "best")
    assert http.get("/weight_info").json() == {"weight_version": "best"}
    assert http.get(URL).json()["version"] == version
    refused = http.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
    assert refused.status_code == 400
    assert "there is no folder" in refused.json()["error"]["message"]


def versions_of(http: httpx.Client) -> list[int]:
    return [worker["version"] for worker in http.get(URL).json()["workers"]]


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4])
def test_a_worker_killed_in_the_middle_of_a_reload_ends_on_one_whole_version(
    fleet: Fleet, http: httpx.Client, delay_s: float
):
    source, victim = fleet.folders[1], fleet.workers[-1]
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(http.post, URL, json={"path": str(source)})
        time.sleep(delay_s)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        fleet.start_worker()
        answer = pushing.result()
    assert answer.status_code == 200, answer.text
    version = answer.json()["version"]
    fleet.paths[version] = source
    until(lambda: versions_of(http) == [version, version], 120)
    for seed in range(8):
        result = generate(http, seed=seed)["result"]
        assert result["stamp"]["weights_version"] == version
        fleet.agrees(result["sequences"][0], result["stamp"])
