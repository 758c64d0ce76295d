"""Servers that are away, busy, cut off or changed in the middle of a file: nothing that was done is lost."""

import json
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

import scorepool
from scorepool import wire
from scorepool.files import file_run, process
from scorepool.files.errors import BadInput, ServerError
from scorepool.local.demo import free_port
from scorepool.sdk import connection
from tests.scorepool.files.faulty_server import CUT, Fault, Reply, faulty_server
from tests.soak import fake_server

NUM_ROWS = 1500
NO_FAULT: Fault = lambda method, path: None  # noqa: E731
REFUSAL = wire.encode(wire.ErrorReply(error=wire.ErrorBody(code="internal", type="server_error", message="no")))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PAUSE", lambda state: 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "in.jsonl"
    found.write_text("".join(f'{{"prompt": "{number}", "completion": "x"}}\n' for number in range(NUM_ROWS)))
    return found


def check(out: Path) -> None:
    """Check that every row is there once, with its own score, and nothing else."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [str(number) for number in range(NUM_ROWS)]
    assert [row["logprob_sum"] for row in rows] == [-float(number) for number in range(NUM_ROWS)]
    assert sorted(each.name for each in out.parent.iterdir()) == ["in.jsonl", out.name]


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize(
    "reply",
    [(429, REFUSAL), (502, b"<html>"), (503, REFUSAL), (504, b""), CUT],
    ids=["429", "502", "503", "504", "cut"],
)
def test_faults_that_pass_change_no_row(path: Path, tmp_path: Path, method: str, reply: Reply):
    num_faults = Counter[str]()

    def fault(found: str, place: str) -> Reply | None:
        if (
            found != method or not place.startswith("/v1/jobs") or num_faults[place] >= 2
        ):  # requests come at the same time
            return None
        num_faults[place] += 1
        return reply

    with faulty_server(fault) as url:
        assert scorepool.score_file(path, tmp_path / "out.jsonl", url=url).num_failed == 0
    assert num_faults.total() >= 2
    check(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((500, REFUSAL), "the server refuses: no"),
        ((503, REFUSAL), "the server refuses: no"),
        ((401, REFUSAL), "the server refuses: no"),
        ((404, b"<html>"), "the server refuses: HTTP 404: <html>"),
        ((200, b"<html>"), "is no scorepool API of this release"),
        (CUT, "no answer from http"),
    ],
    ids=["500", "503", "401", "404", "HTML", "cut"],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_after_a_fault_that_stays_the_same_command_goes_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, reply: Reply, sentence: str
):
    out, port = tmp_path / "out.jsonl", free_port()
    num_calls = Counter[str]()

    def fault(found: str, place: str) -> Reply | None:
        num_calls[found] += place.startswith("/v1/jobs")
        return reply if found == method and num_calls[found] > 2 and place.startswith("/v1/jobs") else None

    with monkeypatch.context() as patch, faulty_server(fault, port) as url:
        patch.setattr(file_run, "RETRY_S", 0.5)
        with pytest.raises(ServerError, match=sentence) as raised:
            scorepool.score_file(path, out, url=url)
    assert "\n" not in str(raised.value)
    assert not out.exists()
    with faulty_server(NO_FAULT, port) as url:
        scorepool.score_file(path, out, url=url)
    check(out)


def test_a_server_that_is_gone_after_the_last_row_keeps_no_row_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "LAST_DELETION_S", 0.2)
    monkeypatch.setattr("scorepool.files.output.journal.CHECKPOINT_S", 60.0)  # so that no job is deleted before the end
    with faulty_server(lambda method, place: CUT if method == "DELETE" else None) as url:
        scorepool.score_file(path, tmp_path / "out.jsonl", url=url)
    check(tmp_path / "out.jsonl")


def test_weights_that_change_in_the_middle_stop_the_work(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out.jsonl"
    right = fake_server.result

    def changed(request: wire.Score) -> wire.Result:
        result = right(request)
        if int(request.items[0].prompt or 0) < NUM_ROWS // 2:
            return result
        return replace(result, stamp=replace(result.stamp, fingerprint="other"))

    monkeypatch.setattr(fake_server, "result", changed)
    with faulty_server(NO_FAULT) as url:
        with pytest.raises(ServerError, match=r"the weights of demo were changed .* fingerprint 'other', expected"):
            scorepool.score_file(path, out, url=url)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl.partial").read_text().splitlines()]
        assert 0 < len(rows) < NUM_ROWS
        monkeypatch.setattr(fake_server, "result", right)
        scorepool.score_file(path, out, url=url)
    check(out)


def serve_adapter(monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> None:
    """Let the server have an adapter `sql` with this content."""
    adapter = wire.ServedAdapter(name="sql", fingerprint=fingerprint, path="/sql", rank=8)
    [model] = fake_server.MODELS.models
    monkeypatch.setattr(fake_server, "MODELS", wire.ModelList(models=[replace(model, adapters=[adapter])]))
    stamp = replace(model.stamp, adapter=f"sql@{fingerprint[:16]}")
    right = fake_server.result
    monkeypatch.setattr(fake_server, "result", lambda request: replace(right(request), stamp=stamp))


def test_the_work_does_not_go_on_with_another_content_of_an_adapter(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, port = tmp_path / "out.jsonl", free_port()
    num_calls = Counter[str]()

    def fault(method: str, place: str) -> Reply | None:
        num_calls[method] += place.startswith("/v1/jobs")
        return (500, REFUSAL) if method == "GET" and num_calls[method] > 3 and "/jobs/" in place else None

    with monkeypatch.context() as patch, faulty_server(fault, port) as url:
        patch.setattr(file_run, "RETRY_S", 0.5)
        serve_adapter(patch, "a" * 64)
        with pytest.raises(ServerError):
            scorepool.score_file(path, out, model="sql", url=url)
    with monkeypatch.context() as patch, faulty_server(NO_FAULT, port) as url:
        serve_adapter(patch, "b" * 64)
        with pytest.raises(BadInput, match=f"begun with the fingerprint of sql '.*,sql@{'a' * 16}' and cannot go on"):
            scorepool.score_file(path, out, model="sql", url=url)
    with monkeypatch.context() as patch, faulty_server(NO_FAULT, port) as url:
        serve_adapter(patch, "a" * 64)
        scorepool.score_file(path, out, model="sql", url=url)
    check(out)


def test_an_adapter_that_is_replaced_in_the_middle_stops_the_work(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serve_adapter(monkeypatch, "a" * 64)
    right = fake_server.result

    def replaced(request: wire.Score) -> wire.Result:
        result = right(request)
        if int(request.items[0].prompt or 0) < NUM_ROWS // 2:
            return result
        return replace(result, stamp=replace(result.stamp, adapter="sql@" + "b" * 16))

    monkeypatch.setattr(fake_server, "result", replaced)
    with faulty_server(NO_FAULT) as url, pytest.raises(ServerError, match=r"the weights of sql were changed .*,sql@b"):
        scorepool.score_file(path, tmp_path / "out.jsonl", model="sql", url=url)
