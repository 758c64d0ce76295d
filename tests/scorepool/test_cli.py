"""The command as a user runs it: processes, output, exit status, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from scorepool import store
from scorepool.cli import KEY_NAME, LOCAL_OWNER, app
from scorepool.local.commands import example_command
from scorepool.local.demo import free_port

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
pytestmark = pytest.mark.timeout(180)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `scorepool` to its end."""
    command = [SCOREPOOL, *arguments]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False)


def processes_of(state: Path) -> list[str]:
    """Return live processes with this state folder: command line and environment, as `ps` prints them."""
    listed = subprocess.run(["ps", "axeww", "-o", "command="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f"SCOREPOOL_STATE_DIR={state}" in line.split()]


@contextmanager
def serving(state: Path, *options: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `scorepool serve`, by default on the demo model; yield the process and its URL when it is ready."""
    environ = os.environ | {"SCOREPOOL_STATE_DIR": str(state)} | environ
    command = [SCOREPOOL, "serve", "--port", str(free_port()), *options]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        try:
            url = next(line for line in serve.stdout if line.startswith("ready ")).split()[1]
            yield serve, url
        finally:
            serve.terminate()
            serve.communicate()


def test_the_demo_shows_the_main_job_and_leaves_nothing_behind(tmp_path: Path):
    done = run("demo", SCOREPOOL_STATE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for promise in ("ready http://127.0.0.1:", "signature verified", "Generated tokens", "Everything is stopped."):
        assert promise in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("stop_signal", "level"), [pytest.param(signal.SIGINT, "eRror", marks=pytest.mark.soak), (signal.SIGTERM, "Info")]
)
def test_serve_runs_until_it_is_stopped_and_logs_at_a_level_in_any_case(
    tmp_path: Path, stop_signal: signal.Signals, level: str
):
    with serving(tmp_path, SCOREPOOL_LOG_LEVEL=level) as (serve, url):
        assert httpx.get(f"{url}/v1/models").json()["models"][0]["id"] == "demo"
        assert httpx.post(f"{url}/v1/jobs", json={}).status_code == 400
        serve.send_signal(stop_signal)
        _, stderr = serve.communicate(timeout=60)
    assert serve.returncode == 0
    assert processes_of(tmp_path) == []
    logged = ["listening on http:" in stderr, "Listening on demo" in stderr, "POST /v1/jobs" in stderr]
    assert logged == [level == "Info"] * 3
    assert "GET /v1/models" not in stderr  # nor any poll


@pytest.mark.soak
def test_a_second_ctrl_c_puts_the_jobs_back_at_once(tmp_path: Path):
    job = {"type": "generate", "model": "demo", "prompt": "import", "max_tokens": 2000, "n": 32, "ignore_eos": True}
    with serving(tmp_path) as (serve, url):
        ids = [httpx.post(f"{url}/v1/jobs", json=job).json()["id"] for _ in range(4)]
        while httpx.get(f"{url}/v1/jobs/{ids[0]}").json()["status"] != "started":
            time.sleep(0.05)
        serve.send_signal(signal.SIGINT)
        time.sleep(1.2)  # two signals within a second count as one
        serve.send_signal(signal.SIGINT)
        _, stderr = serve.communicate(timeout=30)
    assert serve.returncode == 0
    assert re.search(r"asked to stop: finishes [1-4] jobs for up to \d+ s", stderr)
    assert stderr.index("stopping: ") < stderr.index("asked to stop again: ") < stderr.index("jobs in flight put back")


def test_the_last_line_of_a_failed_start_is_its_cause(tmp_path: Path):
    environ = {"SCOREPOOL_STATE_DIR": str(tmp_path), "SCOREPOOL_LOG_FORMAT": "json"}
    with serve_fails("--port", str(free_port()), "--model", "gone=/no/such/folder", **environ) as stderr:
        cause = json.loads(stderr.splitlines()[-1])["message"]
    assert cause.startswith("worker gone ended with 1 before it was ready: ")
    assert cause.count("there is no folder '/no/such/folder'") == 1


@pytest.mark.soak
def test_serve_leaves_out_a_model_that_cannot_be_loaded(tmp_path: Path, root: Path):
    models = ["--model", "gone=/no/such/folder", "--model", f"demo={root}/scorepool/models/demo"]
    with serving(tmp_path, *models) as (serve, url):
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["models"]] == ["demo"]
        assert serve.stdout is not None
        assert '"model":"demo"' in serve.stdout.readline()
        time.sleep(3)  # three times the delay of a restart
        serve.terminate()
        _, stderr = serve.communicate(timeout=60)
    said = [line for line in stderr.splitlines() if "worker gone ended with 1 before it was ready: " in line]
    assert len(said) == 1
    assert "there is no folder '/no/such/folder'" in said[0]
    assert said[0].endswith("; serving the other models without it")
    assert "Traceback" not in stderr


def test_the_examples_that_serve_prints_work_and_its_port_is_in_use(tmp_path: Path):
    with serving(tmp_path / "first") as (serve, url):
        assert serve.stdout is not None
        example, on_file = serve.stdout.readline(), serve.stdout.readline()
        assert example.startswith(f"curl -s {url}/v1/jobs ")
        assert on_file == f"{SCOREPOOL} score FILE.jsonl -o OUT.jsonl --url {url}\n"
        with serve_fails("--port", url.rsplit(":", 1)[1], SCOREPOOL_STATE_DIR=str(tmp_path / "second")) as stderr:
            assert "Address already in use" in stderr
        shown = subprocess.run(["sh", "-c", example], capture_output=True, text=True, check=True).stdout
        (tmp_path / "FILE.jsonl").write_text('{"prompt": "import", "completion": " os"}\n')
        subprocess.run(["sh", "-c", on_file], cwd=tmp_path, capture_output=True, check=True)
        assert '"logprob_sum":' in (tmp_path / "OUT.jsonl").read_text()
    assert '"status":"finished"' in shown


def test_a_killed_serve_leaves_no_process_and_its_jobs_survive(tmp_path: Path):
    body = {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": "b"}]}
    with serving(tmp_path) as (serve, url):
        job = httpx.post(f"{url}/v1/jobs", json=body, headers={"Prefer": "wait=30"}).json()
        serve.kill()
        deadline = time.monotonic() + 60
        while processes_of(tmp_path):
            assert time.monotonic() < deadline, processes_of(tmp_path)
            time.sleep(0.1)
    with serving(tmp_path) as (_, url):
        assert httpx.get(f"{url}/v1/jobs/{job['id']}").json()["result"] == job["result"]


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["serve"], {"SCOREPOOL_PROT": "1"}, "did you mean SCOREPOOL_PORT?"),
        (["serve", "--log-level", "loud"], {}, "SCOREPOOL_LOG_LEVEL='LOUD'"),
        (["serve", "--model", "demo"], {}, "NAME[,ALIAS...]=FOLDER_OR_HUB_ID"),
        (["serve", "--model", "a=x", "--model", "a=y"], {}, "given twice"),
        (["serve", "--model", "a,b=x", "--draft", "b=y"], {}, "expected the first name of a model that is served: a"),
        (["worker", "--model", "a=x", "--draft", "b=y"], {}, "--draft names 'b'; expected the first name of a model"),
        (["serve", "--model", "a=x", "--draft", "a="], {}, "--draft: draft 'a=': expected one NAME=FOLDER_OR_HUB_ID"),
        (["serve", "--host", "0.0.0.0"], {}, "SCOREPOOL_API_KEYS"),
        (["serve", "--model", "gone=/no/such/folder"], {}, "/no/such/folder"),
        (["serve"], {"SCOREPOOL_API_KEY": "sp_x"}, "set SCOREPOOL_API_KEYS to the entry"),
        (["api"], {"SCOREPOOL_API_KEY": "sp_x"}, "env -u SCOREPOOL_API_KEY"),
        (["worker"], {}, "--model NAME=FOLDER_OR_HUB_ID"),
        (["serve", "--tool-parser", "telepathy"], {}, "SCOREPOOL_TOOL_PARSER='telepathy': expected one of "),
        (["api", "--host", "0.0.0.0"], {}, "SCOREPOOL_API_KEYS"),
        (["key", "a b:c"], {}, "NAME is 'a b:c': expected 1 to 64 letters, digits, `.`, `_` or `-`"),
        (["key", "-a"], {}, "No such option"),
        (["key", "a" * 65], {}, "expected 1 to 64 letters"),
    ],
)
def test_a_start_that_cannot_work_ends_with_the_reason(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], message: str
):
    done = run(*arguments, SCOREPOOL_STATE_DIR=str(tmp_path), SCOREPOOL_PORT=str(free_port()), **environ)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert processes_of(tmp_path) == []


def test_port_zero_is_refused(tmp_path: Path):
    with serve_fails("--port", "0", SCOREPOOL_STATE_DIR=str(tmp_path)) as stderr:
        assert "SCOREPOOL_PORT=0" in stderr


@contextmanager
def serve_fails(*arguments: str, **environ: str) -> Iterator[str]:
    """Run `scorepool serve`, expect it to fail, and yield its stderr. Stop it if it wrongly stays up."""
    command = [SCOREPOOL, "serve", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | environ, text=True, **pipes) as serve:
        try:
            assert serve.wait(60) == 1
        finally:
            serve.terminate()
            stdout, stderr = serve.communicate()
        assert "ready" not in stdout
        assert "Traceback" not in stderr
        yield stderr


@pytest.mark.parametrize("command", ["demo", "serve", "redis"])
@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_state_folder_that_cannot_be_created_is_named(tmp_path: Path, command: str, folder: str):
    (tmp_path / "file").touch()
    done = run(command, SCOREPOOL_STATE_DIR=str(tmp_path / folder))
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr
    assert "SCOREPOOL_STATE_DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_redis_folder_that_cannot_be_created_is_named(tmp_path: Path):
    (tmp_path / "redis").touch()
    done = run("redis", SCOREPOOL_STATE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path / "redis") in done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_command_and_the_api_accept_the_same_names():
    assert KEY_NAME == store.KEY_NAME
    assert LOCAL_OWNER == store.LOCAL_OWNER


@pytest.mark.parametrize(
    "name", ["a:b", "", "-a", "a,b", "a b", "a\n", "\N{LATIN SMALL LETTER E WITH ACUTE}", "local", 65 * "x"]
)
def test_a_name_that_the_server_refuses_gets_no_key(name: str):
    done = CliRunner().invoke(app, ["key", "--", name])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("scorepool: NAME is ")


def test_a_key_authenticates_and_only_its_hash_is_configured(tmp_path: Path):
    made = [run("key", name).stdout.splitlines() for name in ("ann", "0-A.b_c" + 57 * "x")]
    keys, entries = ([lines[place].split(maxsplit=1)[1] for lines in made] for place in (0, 1))
    assert not any(key in entry for key in keys for entry in entries)
    with serving(tmp_path, SCOREPOOL_API_KEYS=",".join(entries)) as (_, url):
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
        for key in keys:
            assert httpx.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        command = ["/bin/sh", "-c", example_command(url, "demo", has_keys=True)]
        shown = subprocess.run(
            command, env=os.environ | {"SCOREPOOL_API_KEY": keys[0]}, capture_output=True, check=True
        )
        assert b'"status":"finished"' in shown.stdout


@pytest.mark.parametrize("command", [["api"], ["worker", "--model", "demo=x"], ["worker", "--webhooks"]])
def test_each_command_accepts_a_log_level(monkeypatch: pytest.MonkeyPatch, redis_url: str, command: list[str]):
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environ: started.append((arguments, environ)))
    CliRunner().invoke(app, [*command, "--redis-url", redis_url, "--log-level", "wArning"], catch_exceptions=False)
    [(arguments, environ)] = started
    assert environ["SCOREPOOL_LOG_LEVEL"].upper() == "WARNING"
    if "worker" in command:
        assert arguments[arguments.index("--logging_level") + 1] == "WARNING"
