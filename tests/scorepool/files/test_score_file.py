"""`scorepool score` as a user runs it, against every process of the demo model."""

import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO, TextIOWrapper
from math import exp
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import scorepool
from scorepool import Client, wire
from scorepool.cli import app
from scorepool.files import Summary
from scorepool.files.rows import Row
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
ITEM = wire.ScoreItem(prompt="import 39", completion=" os.path" * 3)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def url(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("s")
    environ = {"SCOREPOOL_PORT": str(free_port())}
    with Stack([f"demo={root}/scorepool/models/demo"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack.url


class Unauthorized(BaseHTTPRequestHandler):
    """An API that wants a key."""

    def do_GET(self) -> None:
        body = b'{"error": {"code": "unauthorized", "message": "no key", "type": "authentication_error"}}'
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def run(url: str, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `scorepool` to its end."""
    environ = os.environ | {"SCOREPOOL_URL": url}
    return subprocess.run(
        [SCOREPOOL, *arguments], env=environ, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def write_rows(path: Path, num_rows: int) -> Path:
    rows = ({"id": index, "prompt": f"import {index}", "completion": " os.path" * 3} for index in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_scored_in_their_order_and_bad_ones_are_named(url: str, tmp_path: Path):
    path, out = write_rows(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = "{"
    lines[7] = json.dumps({"id": 7, "prompt": "a", "completion": "x " * 5000})
    lines[9] = json.dumps({"id": 9, "prompt": "a", "completion": ""})
    lines[11] = json.dumps({"id": 11, "prompt": "a"})
    path.write_text("\n".join(lines))

    done = run(url, "score", path, "-o", out, "--tokens")

    assert done.returncode == 1, done.stderr
    assert "36 rows done, 4 failed" in done.stderr
    rows = read_rows(out)
    assert [row["id"] for row in rows] == [index for index in range(40) if index not in (3, 7, 9, 11)]
    errors = {error["line"]: error["reason"] for error in read_rows(tmp_path / "out.jsonl.errors.jsonl")}
    assert list(errors) == [4, 8, 10, 12]
    assert errors[8] == "the row has 5001 tokens; at most 2048 fit"
    with Client(url) as client:
        assert client.jobs().jobs == []
        job = client.submit(wire.Score(model="demo", items=[ITEM], rank=True))
        [expected] = job.result().sequences
        job.delete()
    row = rows[-1]
    assert expected.logprobs is not None
    assert row["logprobs"] == pytest.approx(list(expected.logprobs), abs=1e-4)
    assert (row["token_ids"], row["ranks"]) == (expected.token_ids, expected.ranks)
    assert row["num_tokens"] == len(expected.token_ids)
    assert row["logprob_sum"] == pytest.approx(expected.logprob_sum, abs=1e-4)
    assert row["perplexity"] == pytest.approx(exp(-(expected.logprob_sum or 0) / len(expected.token_ids)), rel=1e-4)
    assert row["logprob_per_byte"] == pytest.approx((expected.logprob_sum or 0) / 24, rel=1e-4)
    assert row["is_greedy"] == expected.is_greedy


def test_csv_comes_from_stdin_and_goes_to_stdout(url: str):
    options = ["--text", "body", "--input-format", "csv", "--output-format", "csv", "--prefix", "demo_"]
    done = run(url, "score", "-", "-o", "-", *options, stdin="id,body\n1,import os\n2\n3,def f\n")
    assert done.returncode == 1
    assert "row 2 (line 3): the row has 1 fields" in done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [(row["id"], row["body"]) for row in rows] == [("1", "import os"), ("3", "def f")]
    assert all(float(row["demo_perplexity"]) > 1 for row in rows)


@pytest.mark.parametrize(
    ("stop", "status"), [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)]
)
def test_a_stopped_command_goes_on_with_each_row_once(url: str, tmp_path: Path, stop: signal.Signals, status: int):
    path, out, journal = write_rows(tmp_path / "in.jsonl", 3000), tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    command = [SCOREPOOL, "score", str(path), "-o", str(out), "--url", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        while not (journal.exists() and json.loads(journal.read_text())["counts"]["num_rows"]):
            assert first.poll() is None
            time.sleep(0.02)
        first.send_signal(stop)
        _, stderr = first.communicate(timeout=60)
    assert first.returncode == status
    assert "Traceback" not in stderr
    assert not out.exists()
    with Client(url) as client:
        if stop == signal.SIGINT:
            assert {job.status for job in client.jobs().jobs} <= {"canceled", "finished"}

        done = run(url, "score", path, "-o", out)

        assert done.returncode == 0, done.stderr
        assert [row["id"] for row in read_rows(out)] == list(range(3000))
        assert [found.name for found in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]
        assert client.jobs().jobs == []


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_keep_their_types(url: str, tmp_path: Path, ending: str):
    path, out = tmp_path / "in.parquet", tmp_path / f"out.{ending}"
    table = pa.table(
        {
            "id": pa.array(range(300), pa.int16()),
            "text": pa.array([None, *("import os",) * 299], pa.large_string()),
            "at": pa.array([0] * 300, pa.timestamp("s")),
        }
    )
    pq.write_table(table, path)

    summary = scorepool.score_file(path, out, tokens=True, url=url)

    assert (summary.num_rows, summary.num_failed) == (300, 1)
    found = pq.read_table(out) if ending == "parquet" else pa.ipc.open_file(out).read_all()
    assert found.select(["id", "text", "at"]).to_pylist() == table.slice(1).to_pylist()
    assert found.schema.field("id").type == pa.int16()
    assert found.schema.field("text").type == pa.large_string()
    assert found.schema.field("perplexity").type == pa.float64()
    assert found.schema.field("logprobs").type == pa.list_(pa.float64())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.parquet", out.name, f"{out.name}.errors.jsonl"]


def test_prompts_are_continued_and_bad_ones_are_named(url: str, tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["import os", [5, 6], [{"role": "user", "content": "What is os?"}], 1.5, "x " * 5000, [{"role": "x"}]]
    path.write_text("".join(json.dumps({"id": index, "q": prompt}) + "\n" for index, prompt in enumerate(prompts)))
    options = ["--prompt", "q", "--max-tokens", "4", "--temperature", "0", "--tokens"]

    done = run(url, "generate", path, "-o", out, *options)

    assert done.returncode == 1, done.stderr
    rows = read_rows(out)
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert [error["row"] for error in read_rows(tmp_path / "out.jsonl.errors.jsonl")] == [4, 5, 6]
    with Client(url) as client:
        assert client.jobs().jobs == []
        job = client.submit(wire.Generate(model="demo", prompt="import os", max_tokens=4, temperature=0.0))
        [expected] = job.result().sequences
        job.delete()
    assert (rows[0]["generated_text"], rows[0]["token_ids"]) == (expected.text, expected.token_ids)
    assert rows[0]["logprob_sum"] == pytest.approx(sum(expected.logprobs or ()), abs=1e-4)
    assert rows[0]["num_tokens"] == len(expected.token_ids)


def test_score_file_is_a_function(url: str, tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", 3)
    summary = scorepool.score_file(path, tmp_path / "out.csv", url=url)
    assert (summary.num_rows, summary.num_failed, summary.stamp_differences) == (3, 0, [])
    assert summary.num_tokens > 3 * 4
    with pytest.raises(scorepool.FileError, match=r"out\.csv exists"):
        scorepool.score_file(path, tmp_path / "out.csv", url=url)


def test_score_file_works_where_a_loop_runs_as_in_a_notebook(url: str, tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", 3)

    async def cell() -> Summary:
        return scorepool.score_file(path, tmp_path / "out.jsonl", url=url)

    assert asyncio.run(cell()).num_rows == 3
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "options", "status", "sentence"),
    [
        ("", [], 2, "in.jsonl has no rows"),
        ("{\n[", [], 2, "in.jsonl has no row that can be read: line 1: the line is not valid JSON"),
        ('{"a": 1}\n', [], 2, "in.jsonl has no column 'prompt': it has 'a'; name yours with --prompt"),
        ('{"text": "x"}\n', ["--text", "b"], 2, "in.jsonl has no column 'b': it has 'text'"),
        ('{"text": "x"}\n', ["--text", "text", "--prompt", "p"], 2, "--text is given with --prompt"),
        ('{"text": "x", "perplexity": 1}\n', [], 2, "in.jsonl has a column 'perplexity', as the output would"),
        ('{"text": "x"}\n', ["--model", "gone"], 2, "no worker serves 'gone': the server at"),
        ('{"text": "x"}\n', ["--output-format", "xml"], 2, "is of no known format: expected one of .jsonl"),
        ('{"text": "x"}\n', ["--url", "http://127.0.0.1:9"], 3, "start one with `scorepool serve`"),
        ('{"text": "x"}\n', ["-o", "in.jsonl", "--overwrite"], 2, "FILE is in.jsonl, which is written with -o in"),
        (
            '{"text": "x"}\n',
            ["-o", "no/out.jsonl"],
            2,
            "cannot write no/out.jsonl: there is no folder no; nothing was done",
        ),
        ('{"completions": 1, "prompt": 1}\n', [], 2, "no column 'completion' (did you mean 'completions'?): it has"),
        ('{"text": "x"}\n', ["--url", "unix:here"], 2, "the URL is 'unix:here': expected http://HOST:PORT"),
        ('{"text": "x"}\n', ["--api-key", "a\nb"], 2, "the API key has characters that no key has"),
        ('{"text": "x"}\n', ["--priority", "x"], 2, "--priority: Expected 'high' | 'low' | 'normal', found 'x'"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    options: list[str],
    status: int,
    sentence: str,
):
    monkeypatch.chdir(tmp_path)
    path, out = Path("in.jsonl"), Path("out.jsonl")
    path.write_text(content)
    done = CliRunner().invoke(app, ["score", str(path), "-o", str(out), *options], env={"SCOREPOOL_URL": url})
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.exit_code == status
    assert path.read_text() == content
    assert not out.exists()


@pytest.mark.parametrize("suffix", [".partial", ".journal", ".errors.jsonl", ".errors.partial", ".new"])
def test_a_file_that_the_work_writes_is_not_read(url: str, tmp_path: Path, suffix: str):
    path = tmp_path / f"out.jsonl{suffix}"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(scorepool.FileError, match=f"FILE is {path}, which is written with -o"):
        scorepool.score_file(path, tmp_path / "out.jsonl", input_format="jsonl", url=url)
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(path, '{"text": "x"}\n')]


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8")
def test_the_path_of_a_file_may_be_any_bytes(url: str, tmp_path: Path):
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    write_rows(path, 2)
    for suffix in ("jsonl", "parquet"):
        assert scorepool.score_file(path, tmp_path / f"out.{suffix}", url=url).num_failed == 0
    with pytest.raises(scorepool.FileError, match=r"FILE is .*, which is written with -o"):
        scorepool.score_file(path, path, url=url, overwrite=True)
    text = tmp_path / os.fsdecode(b"\xff.txt")
    text.write_text("import os")
    assert scorepool.perplexity(text, tmp_path / "text.jsonl", url=url).num_failed == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_regular_files_are_written(url: str, tmp_path: Path, overwrite: bool):
    path, out = write_rows(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    for make in (out.mkdir, lambda: os.mkfifo(out)):
        make()
        with pytest.raises(scorepool.FileError, match=r"out\.jsonl is no regular file: give another -o") as raised:
            scorepool.score_file(path, out, url=url, overwrite=overwrite)
        assert raised.value.exit_status == 2
        assert sorted(tmp_path.iterdir()) == [path, out]
        out.rmdir() if out.is_dir() else out.unlink()


def test_a_command_that_cannot_work_leaves_nothing_in_the_way_of_a_mended_one(url: str, tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    path.write_text('{"text": "import os", "meta": {}}\n')
    out.write_text("old")
    with pytest.raises(scorepool.FileError, match="column 'meta' does not fit into Parquet"):
        scorepool.score_file(path, out, url=url, overwrite=True)
    assert sorted(tmp_path.iterdir()) == [path, out]
    assert out.read_text() == "old"

    path.write_text('{"text": "import os", "meta": {"a": 1}}\n')
    assert scorepool.score_file(path, out, url=url, overwrite=True).num_failed == 0
    assert pq.read_table(out).to_pylist()[0]["meta"] == {"a": 1}


def test_no_value_of_a_row_is_replaced_by_a_new_column_of_the_same_name(url: str, tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"text": "import os"}\n{"text": "import os", "perplexity": 7}\n')
    assert scorepool.score_file(path, out, url=url).num_failed == 1
    [error] = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert error["reason"] == "the row has a column 'perplexity', as the output: rename it"
    assert error["input"] == {"text": "import os", "perplexity": 7}


@pytest.mark.parametrize("values", [[1, 2], [b"a", b"b"]], ids=["int", "binary"])
def test_a_typed_column_that_holds_no_text_ends_the_command_before_any_job(tmp_path: Path, url: str, values: list[Any]):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": values, "completion": ["x", "y"]}), path)
    for command in ("score", "generate"):
        done = CliRunner().invoke(app, [command, str(path), "-o", str(tmp_path / "out.parquet"), "--url", url])
        assert done.exit_code == 2
        assert f"column 'prompt' of {path} is of type " in done.stderr
        assert [each.name for each in tmp_path.iterdir()] == ["in.parquet"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-tokens", "2048"], "--max-tokens is 2048: expected less than 2048, the context of demo"),
        (["--stop", ""], "stop"),
        (
            ["--seed", "18446744073709551616"],
            "--seed: Expected `int` <= 9223372036854775807, found 18446744073709551616",
        ),
    ],
    ids=" ".join,
)
def test_options_that_no_row_can_have_end_the_command(url: str, tmp_path: Path, options: list[str], sentence: str):
    path = write_rows(tmp_path / "in.jsonl", 3)
    done = CliRunner().invoke(app, ["generate", str(path), "-o", str(tmp_path / "out.jsonl"), "--url", url, *options])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_command_does_not_go_on_with_other_weights(url: str, tmp_path: Path):
    path, out, journal = write_rows(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"

    def stop(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        scorepool.score_file(path, out, url=url, report=stop)
    begun = json.loads(journal.read_text())
    begun["command"]["the fingerprint of demo"] = "other weights"
    journal.write_text(json.dumps(begun))

    with pytest.raises(scorepool.FileError, match=r"begun with the fingerprint of demo 'other weights'.*--overwrite"):
        scorepool.score_file(path, out, url=url)
    assert scorepool.score_file(path, out, url=url, overwrite=True).num_rows == 3


@pytest.mark.parametrize("work", [scorepool.score_file, scorepool.generate_file, scorepool.perplexity])
def test_the_same_command_does_not_go_on_with_another_priority(url: str, tmp_path: Path, work: Callable[..., object]):
    path, out = write_rows(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    text = {"text": "prompt"} if work is scorepool.perplexity else {}

    def stop(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        work(path, out, url=url, report=stop, **text)
    with pytest.raises(scorepool.FileError, match="begun with --priority 'normal' and cannot go on with 'low'"):
        work(path, out, url=url, priority="low", **text)
    work(path, out, url=url, **text)
    assert len(read_rows(out)) == 1


def test_the_same_command_does_not_go_on_with_other_rows_of_stdin(url: str, tmp_path: Path):
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    values = [{"text": f"import {number}"} for number in range(3)]
    lines = [json.dumps(each) + "\n" for each in values]

    def stop(*_: object) -> None:
        raise RuntimeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", TextIOWrapper(BytesIO("".join(lines).encode())))
        with pytest.raises(RuntimeError):
            scorepool.score_file("-", out, url=url, report=stop)
    begun = json.loads(journal.read_text())
    begun["counts"]["num_rows"] = 1
    begun["digest"] = Row(1, 1, 1, values[0]).digest_after("")
    journal.write_text(json.dumps(begun))

    other = run(url, "score", "-", "-o", out, stdin="".join(reversed(lines)))
    assert other.returncode == 2
    assert "the first 1 rows of FILE are not those that OUT was begun with" in other.stderr
    same = run(url, "score", "-", "-o", out, stdin="".join(lines))
    assert same.returncode == 0, same.stderr
    assert [row["text"] for row in read_rows(out)] == ["import 1", "import 2"]


def test_a_reader_of_stdout_that_ends_is_no_error_to_speak_of(url: str, tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", 2000)
    command = f"{SCOREPOOL} score {path} -o - --url {url} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["id"] == 0
    assert done.stderr == ""


def test_a_refused_key_names_the_option(tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", 1)
    with HTTPServer(("127.0.0.1", 0), Unauthorized) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = CliRunner().invoke(app, ["score", str(path), "-o", str(tmp_path / "out.jsonl"), "--url", url])
        server.shutdown()
        thread.join()
    assert done.exit_code == 3
    assert done.stderr.startswith(f"scorepool: {url}: ")
    assert done.stderr.endswith("; give one by SCOREPOOL_API_KEY or --api-key\n")


def test_an_option_that_does_not_exist_is_refused(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n')
    options: dict[str, Any] = {"overwite": True}
    with pytest.raises(TypeError, match="'overwite' is no option: expected url, "):
        scorepool.score_file(path, tmp_path / "out.jsonl", **options)
