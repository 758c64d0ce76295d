"""Whatever is wrong with a push, what served serves on, nothing queued is lost, and the next push works."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from redis import Redis
from safetensors.torch import save, save_file

from scorepool.local.stack import Stack
from tests.api.conftest import ALICE, BOB, bearer
from tests.engine.test_pushed_weights import NORM, broken, changed_copy
from tests.tiny_models import TinyModels
from tests.trainers.conftest import MAX_WEIGHTS_BYTES
from tests.worker.conftest import until

URL = "/v1/models/policy/weights"
OCTETS = {"Content-Type": "application/octet-stream"}
NUM_QUEUED = 6
pytestmark = pytest.mark.timeout(300)
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def base(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.fixture
def bob(policy: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=policy.url, timeout=120, headers=bearer(BOB)) as http:
        yield http


@contextmanager
def serving_on(http: httpx.Client) -> Iterator[dict[str, Any]]:
    """Check that what served before serves after, and that jobs that are queued meanwhile end on it."""
    before = http.get(URL).json()
    body = {"type": "generate", "model": "policy", "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}
    jobs = [http.post("/v1/jobs", json=body | {"seed": seed}).json()["id"] for seed in range(NUM_QUEUED)]
    yield before
    for job_id in jobs:
        job = http.get(f"/v1/jobs/{job_id}", params={"wait": 60}).json()
        stamp = job["result"]["stamp"]
        assert stamp.get("weights_version", 0) == before["version"]
        # The list of models follows with the worker's next heartbeat, which a push before this test may have outrun.
        until(lambda stamp=stamp: fingerprint_of(http) == stamp["fingerprint"], 30)
    after = http.get(URL).json()
    for name in ("version", "fingerprint", "pending", "label", "workers", "state"):
        assert after[name] == before[name]


def fingerprint_of(http: httpx.Client) -> str:
    [model] = http.get("/v1/models").json()["models"]
    return str(model["stamp"]["fingerprint"])


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.fixture
def uploads(policy: Stack) -> Iterator[Callable[[], list[bytes]]]:
    """Return the uploads that are in Redis, beside that which served at first."""
    with Redis.from_url(policy.redis_url) as redis:
        before = {*redis.keys("scorepool:weights_upload:*")}
        yield lambda: [key for key in redis.keys("scorepool:weights_upload:*") if key not in before]


def assert_a_good_push_works(http: httpx.Client, folder: Path, target: Path) -> None:
    """Push other weights as a file, and the model's own again."""
    before, other = http.get(URL).json()["version"], changed_copy(folder, target, seed=9)
    for number, source in enumerate((other, folder), 1):
        answer = http.post(URL, content=(source / "model.safetensors").read_bytes(), headers=OCTETS)
        assert (answer.status_code, answer.json()["version"]) == (200, before + number), answer.text
    assert answer.json()["state"] == "serving"


UNFIT: list[tuple[Change, str]] = [
    (lambda weights: weights.pop(NORM), f"the weights lack {NORM}; expected all 21 tensors of the model"),
    (lambda weights: weights.update(extra=torch.ones(2)), "the weights have, beyond those of the model, extra"),
    (lambda weights: weights.update({NORM: torch.ones(63)}), f"{NORM} has the shape [63], expected [64]"),
    (
        lambda weights: weights.update({NORM: torch.ones(64, dtype=torch.int32)}),
        f"{NORM} has the dtype I32, expected F32",
    ),
    (lambda weights: weights.update({NORM: torch.full((64,), torch.nan)}), f"{NORM} holds NaN"),
]


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(("change", "says"), UNFIT)
def test_weights_that_do_not_fit_are_refused_by_name(
    policy: Stack,
    bob: httpx.Client,
    base: Path,
    tmp_path: Path,
    change: Change,
    says: str,
    is_sent: bool,
    uploads: Callable[[], list[bytes]],
):
    folder = broken(base, tmp_path / "bad", lambda weights: [change(weights)].clear())
    with serving_on(bob) as before:
        if is_sent:
            answer = bob.post(URL, content=(folder / "model.safetensors").read_bytes(), headers=OCTETS)
        else:
            answer = bob.post(URL, json={"path": str(folder)})
        message = error_of(answer, 400)
    assert says in message
    assert f"version {before['version'] + 1} was refused, version {before['version']} serves on: worker " in message
    assert bob.get(URL).json()["failed"] == before["version"] + 1
    assert uploads() == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its header is not complete"),
        (b"garbage, that is no safetensors file", "its header would be longer"),
        (b"\x05\x00\x00\x00\x00\x00\x00\x00{{{{{", "its header cannot be read"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    policy: Stack, bob: httpx.Client, content: bytes, says: str, uploads: Callable[[], list[bytes]]
):
    with serving_on(bob):
        assert says in error_of(bob.post(URL, content=content, headers=OCTETS), 400)
    assert uploads() == []


def test_a_folder_without_weights_of_another_architecture_or_with_half_a_file_is_refused(
    bob: httpx.Client, base: Path, tmp_path: Path
):
    (tmp_path / "empty").mkdir()
    other = Path(shutil.copytree(base, tmp_path / "other"))
    config = json.loads((base / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": config["hidden_size"] * 2}))
    half = Path(shutil.copytree(base, tmp_path / "half"))
    content = (base / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(content[: len(content) // 2])
    with serving_on(bob):
        for folder, says in (
            (tmp_path / "empty", "has no model*.safetensors"),
            (other, f"hidden_size is {2 * config['hidden_size']}, expected {config['hidden_size']}"),
            (half, "is no complete safetensors file"),
        ):
            assert says in error_of(bob.post(URL, json={"path": str(folder)}), 400)


def test_versions_that_never_were_are_named(bob: httpx.Client):
    with serving_on(bob) as before:
        last = before["version"]
        for version in (last, max(0, last - 1)):
            message = error_of(bob.post(URL, json={"path": "/nowhere", "version": version}), 400)
            assert re.match("version: [Ee]xpected ", message)
        body = {"type": "generate", "model": "policy", "prompt": [5], "max_tokens": 1, "if_weights": last + 1000}
        job = bob.post("/v1/jobs", json=body | {"expires_at": time.time() + 1.5}).json()
        ended = bob.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json()
    assert ended["failure"]["code"] == "expired"


def test_a_push_above_the_limit_is_refused_whether_or_not_it_says_its_size(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path, uploads: Callable[[], list[bytes]]
):
    path = tmp_path / "too_large.safetensors"
    save_file({"t": torch.zeros(MAX_WEIGHTS_BYTES // 4)}, path)  # and the header

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(2**16):
                yield chunk

    with serving_on(bob):
        for body in (path.read_bytes(), chunks()):
            message = error_of(bob.post(URL, content=body, headers=OCTETS), 413)
            assert str(MAX_WEIGHTS_BYTES) in message
            assert "SCOREPOOL_MAX_WEIGHTS_BYTES" in message
    assert uploads() == []


def begin_push(policy: Stack, content: bytes) -> socket.socket:
    """Send half of a push, and leave the connection open."""
    host, port = re.fullmatch(r"http://(.+):(\d+)", policy.url).groups()  # type: ignore[union-attr]
    connection = socket.create_connection((host, int(port)))
    head = f"POST {URL} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {BOB}\r\n"
    head += f"Content-Type: {OCTETS['Content-Type']}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content[: len(content) // 2])
    return connection


LARGE = save({"t": torch.zeros(3 * 2**20)})  # of whose first half Redis has a chunk


def test_a_client_that_is_killed_in_the_middle_of_a_push_leaves_nothing(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path, uploads: Callable[[], list[bytes]]
):
    script = (
        "import httpx, sys\n"
        "def chunks():\n"
        "    yield sys.stdin.buffer.read(6_500_000)\n"
        "    sys.stdin.buffer.read()\n"
        f"httpx.post({policy.url + URL!r}, content=chunks(), headers={OCTETS | bearer(BOB)!r})\n"
    )
    with serving_on(bob), subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as client:
        assert client.stdin is not None
        client.stdin.write(LARGE[:6_500_000])
        client.stdin.flush()
        until(lambda: len(uploads()) == 1)
        client.kill()
        until(lambda: uploads() == [])
    assert_a_good_push_works(bob, base, tmp_path / "good")


def test_an_api_that_is_killed_in_the_middle_of_a_push_leaves_what_expires(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path, uploads: Callable[[], list[bytes]]
):
    def is_back() -> bool:
        policy.restart_dead()
        try:
            return bob.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    with serving_on(bob), begin_push(policy, LARGE):
        until(lambda: len(uploads()) == 1)
        os.kill(policy.pid("api"), signal.SIGKILL)
        until(is_back, 60)
    with Redis.from_url(policy.redis_url) as redis:
        [left] = uploads()
        assert 0 < redis.ttl(left) <= 600
    assert_a_good_push_works(bob, base, tmp_path / "good")


def test_a_disk_that_is_full_refuses_the_version_by_name(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path, uploads: Callable[[], list[bytes]]
):
    """No file of the worker may grow beyond half of the weights: the write fails as on a full disk."""
    content = (base / "model.safetensors").read_bytes()
    pid = policy.pid("worker policy")
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with serving_on(bob):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (len(content) // 2, limits[1]))
        try:
            message = error_of(bob.post(URL, content=content, headers=OCTETS), 400)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        assert re.search(r"worker \S+: the weights cannot be written to /\S+: File too large", message)
    assert uploads() == []
    assert_a_good_push_works(bob, base, tmp_path / "good")


def test_of_two_pushes_at_once_one_is_loaded_whole(policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path):
    folders = [changed_copy(base, tmp_path / f"v{seed}", seed=20 + seed) for seed in range(2)]
    before = bob.get(URL).json()["version"]

    def push(folder: Path) -> httpx.Response:
        return httpx.post(policy.url + URL, json={"path": str(folder)}, headers=bearer(BOB), timeout=120)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(push, folders))
    served = [folder for folder, answer in zip(folders, answers, strict=True) if answer.status_code == 200]
    for answer in answers:
        if answer.status_code != 200:
            assert f"version {before + 1} is being loaded" in error_of(answer, 409)
    state = bob.get(URL).json()
    assert served
    assert (state["version"], state["state"], state["pending"]) == (before + len(served), "serving", None)
    assert state["path"] in {str(folder) for folder in served}
    assert_a_good_push_works(bob, base, tmp_path / "good")


def test_only_operators_push(policy: Stack, bob: httpx.Client, base: Path):
    with serving_on(bob):
        answer = httpx.post(policy.url + URL, json={"path": str(base)}, headers=bearer(ALICE))
        assert "SCOREPOOL_OPERATOR_KEYS" in error_of(answer, 403)
