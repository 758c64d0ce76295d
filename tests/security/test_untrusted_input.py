"""A request cannot exhaust the server, name a file, run a checkpoint's code, or learn keys from timing."""

import gzip
import hashlib
import hmac
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

import scorepool.engine.model.checkpoint
from scorepool.api.auth import Keyring
from scorepool.api.http.errors import Unauthorized
from scorepool.store import Settings, queue_name
from scorepool.wire import encode
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, is_ready, running
from tests.tiny_models import TinyModels
from tests.worker.conftest import Workers, generate, outcome, submit

anyio = pytest.mark.anyio
JSON, MSGPACK = {"Content-Type": "application/json"}, {"Content-Type": "application/msgpack"}
MODEL_NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "https://evil.example/m",
    "evil-org/evil-model",
    "demo\x00",
    "~",
]


@anyio
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"[" * 1_000_000, JSON),
        (b'{"items":' * 100_000, JSON),
        (b"\x91" * 1_000_000, MSGPACK),
        (b"\xdd\xff\xff\xff\xff", MSGPACK),  # claims to be a list of 4 billion entries
        (b"\xc6\xff\xff\xff\xff", MSGPACK),
        (b'{"model":"\\ud800"}', JSON),
        (b"9" * 1_000_000, JSON),
        (b'{"type":"score",' + b'"a":1,' * 100_000 + b'"b":1}', JSON),
    ],
)
async def test_deep_wide_and_oversized_bodies_are_400(
    serving: Serving, worker: FakeWorker, body: bytes, headers: dict[str, str]
):
    async with serving() as http:
        for path in ("/v1/jobs", "/v1/jobs/bulk", "/v1/webhooks/endpoints"):
            assert (await http.post(path, content=body, headers=headers)).status_code in (400, 413)


@anyio
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
async def test_compressed_bodies_are_refused(serving: Serving, worker: FakeWorker, encoding: str):
    bomb = gzip.compress(json.dumps(score(items=[{"prompt": "a" * 10_000_000, "completion": "b"}])).encode())
    async with serving() as http:
        reply = await http.post("/v1/jobs", content=bomb, headers=JSON | {"Content-Encoding": encoding})
    assert (reply.status_code, reply.json()["error"]["field"]) == (415, "Content-Encoding")


def test_endless_headers_and_incomplete_requests_do_not_stop_the_server(
    root: Path, redis: Redis, redis_url: str, tmp_path: Path
):
    FakeWorker(redis).register()
    with running(root, redis_url, tmp_path / "log") as (http, _):
        eventually(lambda: is_ready(http))
        address = ("127.0.0.1", http.base_url.port or 0)
        incomplete = [socket.create_connection(address) for _ in range(50)]
        for connection in incomplete:
            connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nX-")
        for header in (b"X-Long: " + b"a" * 2_000_000, b"".join(b"X-%d: a\r\n" % number for number in range(50_000))):
            with socket.create_connection(address, timeout=60) as connection:
                try:
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
                    assert connection.recv(100).split()[1] in (b"400", b"431")
                except (ConnectionResetError, BrokenPipeError):
                    continue  # the server closed the connection before everything was sent
        assert http.post("/v1/jobs", json=score()).status_code == 202
        for connection in incomplete:
            connection.close()


def test_a_key_is_compared_with_every_entry_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []

    def compare_digest(digest: bytes, known: bytes) -> bool:
        compared.append(known)
        return digest == known

    entries = [(name, hashlib.sha256(name.encode()).digest()) for name in ("alice", "bob", "carol")]
    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    keyring = Keyring(entries)
    for key in ("alice", "carol"):
        assert keyring.owner(key) == key
    with pytest.raises(Unauthorized):
        keyring.owner("mallory")
    assert compared == [digest for _, digest in entries] * 3


@anyio
@pytest.mark.parametrize("name", MODEL_NAMES)
async def test_only_model_names_of_workers_are_accepted(serving: Serving, worker: FakeWorker, redis: Redis, name: str):
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=score(model=name))).status_code in (400, 404)
        waiting = await http.post("/v1/jobs", json=score(model=name, wait_for_model=True))
    assert waiting.status_code in (202, 400)
    assert redis.llen("rq:queue:demo") == 0
    if waiting.status_code == 202:  # it waits for a worker of this name
        assert redis.lrange(f"rq:queue:{queue_name(name, 'normal')}", 0, -1)


def test_a_worker_runs_its_own_model_for_any_requested_name(redis: Redis, workers: Workers):
    request = msgspec.structs.replace(generate(), model="evil-org/evil-model")
    job_id = submit(redis, encode(request))
    workers.start("--burst").wait(timeout=60)
    result: Any = outcome(redis, job_id)
    assert result.stamp.model == "demo"
    assert "evil" not in workers.log


def test_code_in_a_checkpoint_is_not_run(tiny_models: TinyModels, tmp_path: Path, root: Path):
    folder = Path(tiny_models("llama"))
    evil = tmp_path / "evil"
    evil.mkdir()
    for file in folder.iterdir():
        (evil / file.name).write_bytes(file.read_bytes())
    code = f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Evil: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "evil.py"):
        (evil / name).write_text(code)
    for name, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        config = json.loads((evil / name).read_text()) if (evil / name).exists() else {}
        config["auto_map"] = {key: "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
        config["model_file"] = "evil.py"
        (evil / name).write_text(json.dumps(config))
    probe = "import sys\nfrom scorepool.engine import *\nEngine(EngineSettings(model=sys.argv[1])).close()"
    completed = subprocess.run(
        [sys.executable, "-c", probe, str(evil)], cwd=root, capture_output=True, text=True, timeout=100
    )
    assert not (tmp_path / "canary").exists(), completed.stderr


def test_trust_remote_code_is_false_everywhere(root: Path):
    assert scorepool.engine.model.checkpoint.__file__
    for file in root.glob("[!.]*/**/*.py"):
        text = file.read_text()
        if file.parts[-2] != "security" and "trust_remote_code" in text:
            assert text.count("trust_remote_code") == text.count("trust_remote_code=False") + text.count(
                '"trust_remote_code": False'
            ), file


def test_a_server_keeps_only_digests_of_its_keys():
    keyring = Keyring.load(Settings(api_keys=f"alice:{hashlib.sha256(b'the-key').hexdigest()}"))
    assert "the-key" not in repr(vars(keyring))
