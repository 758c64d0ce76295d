"""`scorepool perplexity`, against every process of two models and transformers on torch."""

import json
import os
import sys
from collections import Counter
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import scorepool
from scorepool.cli import app
from scorepool.files.formats.documents import open_documents
from scorepool.files.scoring.windows import cut_windows

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels

pytestmark = pytest.mark.timeout(180)
LONG = "the quick brown fox jumps over the lazy dog größer 你好 🙂 and then the dog sleeps in the sun. " * 12
SHORT = "a token is scored under the model"


def guide_logprob_sum(folder: Path, text: str, context: int, stride: int) -> tuple[float, int]:
    """Return the sum of logprobs and the number of tokens by the loop of transformers' guide to perplexity."""
    from tests.engine.oracle import Oracle
    from tests.tiny_tokenizer import build_tokenizer

    oracle, token_ids = Oracle(folder), build_tokenizer()(text).input_ids
    total, num_scored, previous_end = 0.0, 0, 0
    for begin in range(0, len(token_ids), stride):
        end = min(begin + context, len(token_ids))
        window, num_targets = token_ids[begin:end], end - previous_end
        logprobs = oracle.logprobs(window)
        targets = range(max(1, len(window) - num_targets), len(window))  # labels are shifted: the first has none
        total += sum(logprobs[at - 1, window[at]] for at in targets)
        num_scored += len(targets)
        previous_end = end
        if end == len(token_ids):
            break
    return total, num_scored


@pytest.mark.parametrize(("context", "stride"), [(64, 16), (50, 49), (None, None)])
def test_windows_give_the_perplexity_of_the_guide_in_transformers(
    two_models_url: str, tiny_models: "TinyModels", tmp_path: Path, context: int | None, stride: int | None
):
    (tmp_path / "long.txt").write_text(LONG)
    (tmp_path / "short.txt").write_text(SHORT)

    found = scorepool.perplexity(tmp_path, model="tiny", context=context, stride=stride, url=two_models_url)

    expected = [guide_logprob_sum(tiny_models("llama"), text, context or 512, stride or 256) for text in (LONG, SHORT)]
    for document, text, (logprob_sum, num_tokens) in zip(found.documents, (LONG, SHORT), expected, strict=True):
        assert document["num_tokens"] == num_tokens
        assert document["num_bytes"] == len(text.encode())
        assert document["logprob_sum"] / num_tokens == pytest.approx(logprob_sum / num_tokens, abs=1e-4)
        assert log(document["perplexity"]) == pytest.approx(-logprob_sum / num_tokens, abs=1e-4)
        assert document["bits_per_byte"] == pytest.approx(-logprob_sum / log(2) / len(text.encode()), abs=1e-4)
    assert [document["file"] for document in found.documents] == ["long.txt", "short.txt"]
    total, num_tokens = (sum(values) for values in zip(*expected, strict=True))
    assert found.num_tokens == num_tokens
    assert found.num_bytes == len((LONG + SHORT).encode())
    assert found.perplexity == pytest.approx(exp(-total / num_tokens), rel=1e-4)
    assert found.bits_per_token == pytest.approx(-total / log(2) / num_tokens, rel=1e-4)


def test_each_token_but_the_first_is_scored_once_in_a_window_of_the_context():
    for num_tokens in (0, 1, 2, 7, 8, 9, 30, 64):
        for context, stride in ((8, 1), (8, 3), (8, 7), (2, 1), (64, 32)):
            windows = list(cut_windows(num_tokens, context, stride))
            scored = Counter(at for window in windows for at in range(window.scored_from, window.end))
            assert scored == Counter(range(1, num_tokens))
            assert all(window.begin < window.scored_from < window.end <= window.begin + context for window in windows)
            assert all(window.scored_from - window.begin >= context - stride for window in windows[1:])


def test_a_document_of_more_windows_than_a_job_has_items_is_whole(two_models_url: str, tmp_path: Path):
    path = tmp_path / "text.md"
    path.write_text("x y " * 150)
    found = scorepool.perplexity(path, model="tiny", context=4, stride=1, url=two_models_url)
    [document] = found.documents
    assert document["num_windows"] > 256
    assert document["num_tokens"] == document["num_windows"] + 2
    assert document["num_bytes"] == 600


def test_documents_of_a_table_and_failures_are_written(two_models_url: str, tmp_path: Path):
    path, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    texts = ["import os", "", None, "你好 größer", "x"]
    pq.write_table(pa.table({"id": range(5), "body": texts}), path)

    found = scorepool.perplexity(path, out, model="demo", text="body", url=two_models_url)

    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    assert [row["body"] for row in rows] == ["import os", "你好 größer"]
    assert (found.num_documents, found.num_failed, found.documents) == (2, 3, [])
    assert found.num_tokens == sum(row["num_tokens"] for row in rows)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()]
    assert reasons == [
        "the document has 0 characters: expected 1 to 8000000",
        "column 'body' is null: expected text",
        "the document has no token after its first, which has no logprob",
    ]


def test_the_command_prints_a_table_of_the_files_of_a_folder(two_models_url: str, tmp_path: Path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "b.txt").write_text(SHORT)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.md").write_text("not read")

    done = CliRunner().invoke(app, ["perplexity", str(tmp_path), "--model", "tiny", "--url", two_models_url])

    assert done.exit_code == 1, done.stderr
    header, document, everything = (line.split() for line in done.stdout.splitlines())
    assert header[:3] == ["document", "num_tokens", "num_bytes"]
    assert document[0] == "part/b.txt"
    assert everything == ["all", *document[1:]]
    assert "a.txt: the file is not UTF-8 text" in done.stderr
    assert "1 document done, 1 failed" in done.stderr


def test_the_command_names_rows_of_a_table_by_their_numbers(two_models_url: str, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "import os"}\n{"text": ""}\n{\n{"text": "def f"}\n')
    done = CliRunner().invoke(app, ["perplexity", str(path), "--model", "tiny", "--url", two_models_url])
    assert done.exit_code == 1, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["document", "1", "4", "all"]


def test_the_work_goes_on_only_with_the_context_that_it_was_begun_with(two_models_url: str, tmp_path: Path):
    path, out, journal = tmp_path / "long.txt", tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    path.write_text(LONG)

    def stop(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        scorepool.perplexity(path, out, model="tiny", url=two_models_url, report=stop)
    begun = json.loads(journal.read_text())
    assert (begun["command"]["--context"], begun["command"]["--stride"]) == (512, 256)
    begun["command"] |= {"--context": 128, "--stride": 64}  # as if the worker then had a shorter context
    journal.write_text(json.dumps(begun))

    with pytest.raises(scorepool.FileError, match="begun with --context 128 and cannot go on with 512"):
        scorepool.perplexity(path, out, model="tiny", url=two_models_url)
    assert scorepool.perplexity(path, out, model="tiny", context=128, url=two_models_url).num_documents == 1


def test_the_identity_of_a_folder_is_that_of_its_files(tmp_path: Path):
    def identity() -> dict[str, Any]:
        with open_documents(str(tmp_path), None, "**/*.txt") as source:
            return source.identity

    (tmp_path / "a.txt").write_text("a")
    first = identity()
    assert identity() == first
    (tmp_path / "b.md").write_text("b")
    assert identity() == first
    (tmp_path / "b.txt").write_text("b")
    assert identity() != first


def test_out_in_the_folder_is_no_document(two_models_url: str, tmp_path: Path):
    (tmp_path / "a.md").write_text(SHORT)
    (tmp_path / "b.md").write_bytes(b"\xff")
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        found = scorepool.perplexity(tmp_path, out, glob="*", model="tiny", overwrite=True, url=two_models_url)
        assert (found.num_documents, found.num_failed) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "b.md", "out.jsonl", "out.jsonl.errors.jsonl"]


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has only names in UTF-8")
def test_names_of_files_that_are_not_utf8_are_shown(tmp_path: Path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("a")
    with open_documents(str(tmp_path), None, "**/*.txt") as source:
        assert [row.values for row in source.rows] == [{"file": "\ufffd.txt", "text": "a"}]


def test_a_dry_run_counts_the_tokens_of_all_windows_and_writes_nothing(two_models_url: str, tmp_path: Path):
    from tests.tiny_tokenizer import build_tokenizer

    for name, text in (("a.txt", LONG), ("b.txt", SHORT), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    tokenizer = build_tokenizer()
    num_tokens = 0
    for text in (LONG, SHORT):
        left = len(tokenizer(text).input_ids)
        while left > 64:
            num_tokens, left = num_tokens + 64, left - 16
        num_tokens += left

    options = ["--context", "64", "--stride", "16", "--model", "tiny", "--url", two_models_url, "--dry-run"]
    done = CliRunner().invoke(app, ["perplexity", str(tmp_path), "-o", str(tmp_path / "out.csv"), *options])
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert lines[0] == "3 rows, 1 of them bad"
    assert lines[1].startswith(f"about {num_tokens:,} tokens, by a sample of 2 rows")
    assert lines[2].endswith("(line 3): c.txt: the document has 0 characters: expected 1 to 8000000")
    assert lines[-1] == "nothing was written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "c.txt"]


@pytest.mark.parametrize(("out", "going_on"), [([], False), (["-o", "-"], False), (["-o", "out.csv"], True)])
def test_an_end_by_ctrl_c_says_whether_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, out: list[str], going_on: bool
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scorepool.files.perplexity", interrupted)
    done = CliRunner().invoke(app, ["perplexity", "notes", *out])
    assert done.exit_code == 130
    assert done.stderr.startswith("scorepool: stopped")
    assert ("goes on where it stopped" in done.stderr) == going_on


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": 513}, "--context is 513: expected 2 to 512, the context of tiny"),
        ({"context": 8, "stride": 8}, "--stride is 8: expected 1 to 7, less than the context"),
        ({"priority": "x"}, "--priority: Expected 'high'"),
        ({"text": "body"}, "is no table, so it has no column 'body'"),
        ({"glob": "*.rst"}, r"has no file \*.rst: name its files with --glob"),
    ],
)
def test_options_that_cannot_work_leave_no_files(
    two_models_url: str, tmp_path: Path, options: dict[str, Any], sentence: str
):
    (tmp_path / "a.txt").write_text(SHORT)
    with pytest.raises(scorepool.FileError, match=sentence):
        scorepool.perplexity(tmp_path, tmp_path / "out.csv", model="tiny", url=two_models_url, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
