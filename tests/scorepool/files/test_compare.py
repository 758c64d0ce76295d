"""`scorepool compare`, against every process of two models."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import scorepool
from scorepool import Client
from scorepool.cli import app
from scorepool.files.scoring.comparison import differences

pytestmark = pytest.mark.timeout(180)


def write_rows(path: Path, completions: list[str]) -> Path:
    rows = [{"id": index, "prompt": "import", "completion": each} for index, each in enumerate(completions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_models_are_compared_row_by_row_with_paired_errors(two_models_url: str, tmp_path: Path):
    completions = [" os.path", " größer 你好 🙂", " sys and the dog sleeps", " token"]
    path, out = write_rows(tmp_path / "in.jsonl", completions), tmp_path / "out.parquet"

    summary = scorepool.compare_file(path, out, models=["demo", "tiny"], tokens=True, url=two_models_url)

    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    with Client(two_models_url) as client:
        for model in ("demo", "tiny"):
            items = [("import", each) for each in completions]
            for row, sequence in zip(rows, client.score(model, items).sequences, strict=True):
                assert row[f"{model}_logprobs"] == pytest.approx(list(sequence.logprobs or ()), abs=1e-4)
                assert row[f"{model}_logprob_sum"] == pytest.approx(sequence.logprob_sum, abs=1e-4)
    bits = np.array([row["tiny_bits_per_byte"] - row["demo_bits_per_byte"] for row in rows])
    assert [row["tiny_bits_per_byte_difference"] for row in rows] == pytest.approx(bits.tolist())
    assert [row["tiny_wins"] for row in rows] == (bits < 0).astype(float).tolist()
    assert summary.means["tiny_bits_per_byte_difference"].mean == pytest.approx(bits.mean())
    assert summary.means["tiny_bits_per_byte_difference"].stderr == pytest.approx(bits.std(ddof=1) / sqrt(len(bits)))
    assert summary.means["tiny_wins"].mean == pytest.approx((bits < 0).mean())
    for row in rows:
        same_tokens = row["demo_tokens"] == row["tiny_tokens"]
        assert (row["tiny_logprob_per_token_difference"] is None) == (not same_tokens)
        assert row["tiny_logprob_sum_difference"] == pytest.approx(row["tiny_logprob_sum"] - row["demo_logprob_sum"])


def test_a_model_does_not_differ_from_itself_and_other_tokens_are_named(two_models_url: str, tmp_path: Path):
    path, out = write_rows(tmp_path / "in.jsonl", [" os", " the dog sleeps in the sun", "x " * 600]), tmp_path / "o.csv"
    options = ["--model", "demo", "--model", "tiny", "--url", two_models_url]

    done = CliRunner().invoke(app, ["compare", str(path), "-o", str(out), *options])

    assert done.exit_code == 1, done.stderr
    assert "2 rows done, 1 failed" in done.stderr
    assert "tiny_wins " in done.stderr
    assert "tiny and the first model divide " in done.stderr
    [error] = (tmp_path / "o.csv.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["reason"].startswith("tiny: the row has ")


@pytest.mark.parametrize("models", [[], ["demo"], ["demo", "demo"]])
def test_fewer_than_two_models_are_refused(tmp_path: Path, models: list[str]):
    path = write_rows(tmp_path / "in.jsonl", [" os"])
    with pytest.raises(scorepool.FileError, match="expected at least two different ones"):
        scorepool.compare_file(path, tmp_path / "out.jsonl", models=models)


def test_more_top_logprobs_than_any_request_has_are_refused(tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", [" os"])
    with pytest.raises(scorepool.FileError, match="--top-logprobs: Expected `int` <= 1024, found 1000"):
        scorepool.compare_file(path, tmp_path / "out.jsonl", models=["a", "b"], top_logprobs=10**20)


def test_a_column_that_the_output_has_is_to_be_renamed(two_models_url: str, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "demo_perplexity": 1}\n')
    with pytest.raises(scorepool.FileError, match="a column 'demo_perplexity', as the output would: rename it"):
        scorepool.compare_file(path, tmp_path / "out.jsonl", models=["demo", "tiny"], url=two_models_url)


def test_differences_are_null_where_the_models_do_not_score_the_same():
    score = {"logprob_sum": -3.0, "logprob_per_token": -1.5, "bits_per_byte": 1.0}
    first = {"logprob_sum": -4.0, "logprob_per_token": -2.0, "bits_per_byte": 1.5}
    assert differences(score, first, [b"a", b"b"], [b"a", b"b"]) == {
        "logprob_sum_difference": 1.0,
        "logprob_per_token_difference": 0.5,
        "bits_per_byte_difference": -0.5,
        "wins": 1.0,
    }
    assert differences(score, first, [b"ab"], [b"a", b"b"])["logprob_per_token_difference"] is None
    assert differences(score, first, [b"ab"], [b"a", b"b"])["logprob_sum_difference"] == 1.0
    assert differences(score, first, [b"b"], [b"a", b"b"])["logprob_sum_difference"] is None
    assert differences(first, score, [b"b"], [b"b"])["wins"] == 0.0
    assert differences(first, first, [b"b"], [b"b"])["wins"] == 0.5
    assert differences(first | {"bits_per_byte": None}, first, [], [b"b"])["wins"] is None
