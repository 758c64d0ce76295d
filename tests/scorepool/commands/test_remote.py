"""The commands that talk to an API, against a real stack of the demo model."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from scorepool import Client, sdk, store, wire
from scorepool.cli import app
from scorepool.commands import remote
from scorepool.commands.jobs import _describe_classifications, _describe_sequences, duration
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.api.fake_worker import RESULT

SCORE = wire.Score(model="demo", items=[wire.ScoreItem(prompt="import", completion=" os.path")])
WAITS = wire.Score(model="gone", items=SCORE.items)


@pytest.fixture(scope="module")
def url(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("s")
    environ = {"SCOREPOOL_PORT": str(free_port())}
    with Stack([f"demo,d={root}/scorepool/models/demo"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack.url


@pytest.fixture(scope="module")
def job(url: str) -> str:
    """Run a job to its end; return its id."""
    with Client(url) as client:
        job = client.submit(SCORE)
        job.result(60)
        return job.id


def run(*arguments: str, url: str = "") -> Result:
    environ = {"SCOREPOOL_URL": url or None, "SCOREPOOL_API_KEY": None, "SCOREPOOL_CLIENT_KEY": None}
    return CliRunner().invoke(app, arguments, env=environ, catch_exceptions=False)


def lines_of(done: Result) -> list[list[str]]:
    return [line.split() for line in done.stdout.splitlines()]


def test_jobs_are_listed(url: str, job: str):
    heading, *rows = lines_of(run("jobs", url=url))
    assert heading == ["ID", "KIND", "MODEL", "STATUS", "AGE", "TOOK"]
    assert [job, "score", "demo", "finished"] in [row[:4] for row in rows]
    page = json.loads(run("jobs", "--json", "--limit", "1", "--status", "finished", url=url).stdout)
    assert [one["status"] for one in page["jobs"]] == ["finished"]
    assert run("jobs", "--model", "other", url=url).stdout == "no jobs\n"


def test_a_page_of_jobs_names_the_next(url: str, job: str):
    with Client(url) as client:
        client.submit(SCORE).result(60)
    first = lines_of(run("jobs", "--limit", "1", url=url))
    assert first[2][:3] == ["older", "ones:", "--cursor"]
    second = lines_of(run("jobs", "--limit", "1", "--cursor", first[2][3], url=url))
    assert first[1][0] != second[1][0]


def test_a_job_is_shown_with_its_result(url: str, job: str):
    with Client(url) as client:
        result = client.result(job)
    shown = run("job", job, url=url).stdout
    assert f"{result.sequences[0].logprob_sum:.4f}  ' os.path'" in shown
    assert json.loads(run("job", job, "--json", url=url).stdout)["result"]["sequences"][0]["text"] == " os.path"


def test_jobs_are_canceled_and_one_that_cannot_be_gives_status_1(url: str, job: str):
    with Client(url) as client:
        waiting = client.submit(
            wire.Generate(model="demo", prompt="a", n=128, max_tokens=400, ignore_eos=True)
        ).detach()
    done = run("cancel", waiting.id, job, "no-such-job", url=url)
    assert done.exit_code == 1
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"{waiting.id}: canceled")
    assert second.startswith(f"{job}: not canceled: ")
    assert third.startswith("no-such-job: not canceled: ")
    assert [json.loads(line)["canceled"] for line in run("cancel", job, "--json", url=url).stdout.splitlines()] == [
        False
    ]


def test_a_batch_is_shown_and_canceled_by_its_id(url: str):
    body = {"model": "demo", "prompt": "import", "max_tokens": 1}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    with Client(url) as client:
        file = client.upload_file(wire.encode_json(line))
        batch = client.create_batch(file.id, "/v1/completions")
    shown = dict(each.split(maxsplit=1) for each in run("job", batch.id, "--wait", "60", url=url).stdout.splitlines())
    assert (shown["kind"], shown["status"], shown["lines"]) == ("batch", "completed", "1 completed and 0 failed of 1")
    assert json.loads(run("job", batch.id, "--json", url=url).stdout)["request_counts"]["completed"] == 1
    ended = run("cancel", batch.id, url=url)
    assert (ended.exit_code, ended.stdout.partition(": ")[2]) == (
        1,
        "not canceled: the batch is completed, only one that has not ended can be cancelled\n",
    )
    waiting = wire.encode_json(line | {"body": body | {"max_tokens": 200, "ignore_eos": True, "n": 8}}) + b"\n"
    with Client(url) as client:
        file = client.upload_file(b"".join(waiting.replace(b'"1"', b'"%d"' % number) for number in range(200)))
        batch = client.create_batch(file.id, "/v1/completions")
    assert run("cancel", batch.id, url=url).stdout.startswith(f"{batch.id}: canceled")
    with Client(url) as client:
        assert client.wait_for_batch(batch.id, timeout_s=60).status == "cancelled"
    assert "no batch" in run("job", "batch_x", url=url).stderr


def test_models_are_listed(url: str):
    heading, row = lines_of(run("models", url=url))
    assert dict(zip(heading, row, strict=True)).items() >= {"MODEL": "demo", "ALIASES": "d", "DTYPE": "float32"}.items()
    assert [one["id"] for one in json.loads(run("models", "--json", url=url).stdout)] == ["demo"]


def test_the_status_shows_queues_and_workers(url: str, job: str):
    done = run("status", url=url)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{url}: ready\n")
    assert ["demo", "0", "0", "-"] in lines_of(done)
    read = json.loads(run("status", "--json", url=url).stdout)
    assert read["redis"] == "up"
    assert [worker["id"] for worker in read["workers"]] == ["demo"]
    assert {"queue": "demo", "queued": 0, "started": 0, "oldest_s": 0.0} in read["queues"]
    assert read["ended"]["result"] >= 1


def test_top_prints_one_screen(url: str, job: str):
    done = run("top", "--once", url=url)
    assert done.exit_code == 0
    assert f"{url}  ready" in done.stdout
    assert "0 queued, 0 running" in done.stdout
    assert json.loads(run("top", "--json", url=url).stdout)["url"] == url


def test_the_status_shows_how_full_a_worker_is(url: str):
    endless = wire.Generate(model="demo", prompt="a", max_tokens=1500, n=3, ignore_eos=True)
    with Client(url) as client:
        client.submit(endless)
        deadline = time.monotonic() + 60
        while (load := json.loads(run("models", "--json", url=url).stdout)[0]["load"])["running_rows"] != 3:
            assert time.monotonic() < deadline  # rows of an earlier test may run on for a moment
            time.sleep(0.2)
        assert load["max_running_rows"] == 32
        assert 0 < load["cached_tokens"] < load["max_cached_tokens"]
        assert "3/32" in run("status", url=url).stdout
        assert "3/32" in run("top", "--once", url=url).stdout


def test_status_1_says_that_no_worker_takes_jobs(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Client, "models", lambda _: [])
    done = run("status", url=url)
    assert done.exit_code == 1
    assert "no worker takes jobs: start one with `scorepool worker" in done.stdout


COMMANDS = [["jobs"], ["job", "x"], ["cancel", "x"], ["models"], ["status"], ["top", "--once"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_one_sentence_says_how_to_start_an_api(command: list[str]):
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = run(*command, "--url", nowhere)
    assert done.exit_code == 3
    assert done.stdout == ""
    assert done.stderr == (
        f"scorepool: no API answers at {nowhere}: start one with `scorepool serve`, or give the URL of another with "
        "--url or SCOREPOOL_URL\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["jobs", "--url", "nowhere"], 2, "the URL is 'nowhere': expected http://HOST:PORT, https://HOST or unix:"),
        (["jobs", "--api-key", "\N{GREEK SMALL LETTER ALPHA}"], 2, "the API key has characters that no key has"),
        (["jobs", "--api-key", "a\nb"], 2, "the API key has characters that no key has"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], status: int, message: str):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith(f"scorepool: {message}")


@pytest.fixture
def other_server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of a server that answers everything with a status and content, which the test sets."""
    answer: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.end_headers()
            self.wfile.write(answer["content"])

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answer
        server.shutdown()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_key_that_is_refused_is_named_once(other_server: tuple[str, dict[str, Any]], command: list[str]):
    url, answer = other_server
    error = wire.ErrorBody(code="unauthorized", type="authentication_error", message="this API key is not known here")
    answer |= {"status": 401, "content": wire.encode(wire.ErrorReply(error=error))}
    done = run(*command, *(["y"] if command[0] == "cancel" else []), "--api-key", "wrong", url=url)
    sentence = "this API key is not known here; give one by SCOREPOOL_API_KEY or --api-key"
    assert (done.exit_code, done.stdout, done.stderr) == (3, "", f"scorepool: {url}: {sentence}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("status", "content"), [(404, b"<html>"), (200, b"<html>")])
def test_a_server_that_is_no_api_is_named(
    other_server: tuple[str, dict[str, Any]], command: list[str], status: int, content: bytes
):
    url, answer = other_server
    answer |= {"status": status, "content": content}
    done = run(*command, url=url)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith(f"scorepool: what answers at {url} is no scorepool API")


def test_a_job_that_the_api_does_not_have_is_named(url: str):
    done = run("job", "no-such-job", url=url)
    assert done.exit_code == 1
    assert done.stderr.startswith("scorepool: ")
    assert "no-such-job" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["jbos"], "Did you mean 'jobs'?"),
        (["jobs", "--limt", "3"], "--limit"),
        (["jobs", "--status", "done"], "is not one of 'queued'"),
        (["job"], "Missing argument 'JOB'"),
    ],
)
def test_a_typo_is_answered_with_what_would_be_right(arguments: list[str], hint: str):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert hint in done.stderr


@pytest.mark.parametrize("command", ["jobs", "job", "cancel", "models", "status", "top", "verify"])
def test_help_shows_defaults_variables_and_exit_statuses(command: str):
    shown = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    for promise in (
        "http://127.0.0.1:8000",
        "SCOREPOOL_URL",
        "SCOREPOOL_API_KEY",
        "SCOREPOOL_CLIENT_KEY",
        "Exit status 0: ",
        "130: Ctrl-C",
    ):
        assert promise in shown


@pytest.mark.parametrize("command", ["serve", "api"])
def test_help_shows_the_defaults_of_settings(command: str):
    shown = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    defaults = store.Settings()
    for default in (defaults.host, defaults.port, defaults.log_level.lower()):
        assert f"[default: ({default})]" in shown
    assert f"[default: ({defaults.dtype})]" in shown or command == "api"


def test_the_default_url_is_that_of_the_sdk():
    assert remote.DEFAULT_URL == sdk.connection.DEFAULT_URL


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1.0, "0 s"), (0.25, "0.25 s"), (42.4, "42 s"), (180, "3 min"), (18_000, "5 h"), (172_800, "2 d")],
)
def test_times_are_shown_for_people(seconds: float, shown: str):
    assert duration(seconds) == shown


def test_an_item_that_failed_is_shown_with_its_reason():
    failure = wire.Failure(code="too_long", message="items[1]: it is too long", field="items[1]")
    good = wire.Classification(label="A", logits=wire.Floats([0.5]), probs=None, num_tokens=3)
    bad = wire.Classification(label="", logits=wire.Floats(), probs=None, num_tokens=0, failure=failure)
    shown = _describe_classifications(replace(RESULT, labels=["A"], classifications=[good, bad]))
    failed = replace(RESULT.sequences[0], failure=failure)

    assert "it is too long" in shown[0].splitlines()[2]
    assert "it is too long" in _describe_sequences([failed])[0]
