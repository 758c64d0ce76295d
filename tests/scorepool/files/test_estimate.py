"""`--dry-run` of the commands that work on files, against every process of the demo model."""

import json
import time
from pathlib import Path

from typer.testing import CliRunner

from scorepool import Client, compare_file, generate_file, score_file
from scorepool.cli import app

NUM_ROWS = 300


def write_rows(path: Path) -> Path:
    rows: list[dict[str, object]] = [
        {"prompt": f"import os{index}", "completion": " path" * (1 + index % 7)} for index in range(NUM_ROWS)
    ]
    rows[5] = {"prompt": "a"}
    rows[6] = {"prompt": "a", "completion": "x " * 5000}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_dry_run_tells_rows_tokens_and_time_and_writes_nothing(two_models_url: str, tmp_path: Path):
    path, out = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    options = {"model": "tiny", "url": two_models_url}
    with Client(two_models_url) as client:
        before = client.jobs().jobs  # of other tests
        dry = score_file(path, out, dry_run=True, **options)
        assert client.jobs().jobs == before
    assert list(tmp_path.iterdir()) == [path]

    done = score_file(path, out, **options)
    assert dry.estimate is not None
    assert (dry.num_rows, dry.num_failed, dry.models) == (NUM_ROWS, 1, ["tiny"])
    assert 64 <= dry.estimate.num_sampled <= 128
    assert dry.estimate.first_reason.startswith("row 6 (line 6): the row has no column 'completion'")
    assert done.estimate is None

    with Client(two_models_url) as client:
        deadline = time.monotonic() + 120
        while not all(worker.link and worker.link.tokens_per_s for worker in client.models() if worker.id == "tiny"):
            assert time.monotonic() < deadline
            time.sleep(0.2)  # until the worker's next heartbeat
    after = score_file(path, out, dry_run=True, **options)  # although OUT exists
    assert after.estimate is not None
    assert after.estimate.tokens_per_s
    assert after.estimate.duration_s == after.num_tokens / after.estimate.tokens_per_s


def test_the_tokens_of_a_sample_are_those_of_all_rows(two_models_url: str, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"import {100 + index}", "completion": " os.path"} for index in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"models": ["demo", "tiny"], "url": two_models_url}
    dry = compare_file(path, tmp_path / "a.jsonl", dry_run=True, **options)
    done = compare_file(path, tmp_path / "b.jsonl", **options)
    assert abs(dry.num_tokens - done.num_tokens) < 0.03 * done.num_tokens


def test_generated_tokens_count_in_full_and_rows_that_do_not_fit_are_counted(two_models_url: str, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": [5] * length} for length in (10, 20, 2040)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dry = generate_file(path, tmp_path / "out.jsonl", model="demo", max_tokens=50, dry_run=True, url=two_models_url)
    assert dry.num_tokens == 10 + 20 + 2040 + 3 * 50
    assert dry.estimate is not None
    assert (dry.estimate.num_unfit, dry.estimate.first_reason) == (
        1,
        "row 3 (line 3): the row has 2090 tokens; at most 2048 fit",
    )


def test_the_command_exits_with_0(two_models_url: str, tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl")
    command = ["score", str(path), "-o", str(tmp_path / "out"), "--output-format", "jsonl", "--model", "demo"]
    done = CliRunner().invoke(app, [*command, "--dry-run", "--url", two_models_url])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("300 rows, 1 of them bad\nabout ")
    assert done.stderr.endswith("\nnothing was written\n")
    assert list(tmp_path.iterdir()) == [path]
