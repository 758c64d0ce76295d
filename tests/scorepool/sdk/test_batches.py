"""The methods for files and batches, against servers that are busy, slow or cut off."""

import time
from email import message_from_bytes
from pathlib import Path

import pytest

from scorepool import BatchTimeout, Client, Unreachable, wire
from scorepool.sdk import async_batches
from tests.scorepool.sdk.test_client import Answer, Sent, server

FILE = wire.FileObject(id="file-1", bytes=2, created_at=0, expires_at=1, filename="a.jsonl", purpose="batch")
BATCH = wire.Batch(
    id="batch_1",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=0,
    expires_at=1,
    request_counts=wire.RequestCounts(total=7, completed=2, failed=1),
)


def test_an_upload_sends_the_whole_file_again_after_a_refusal_and_a_lost_reply(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" * 50_000)
    sent: list[Sent] = []
    lost = (200, {"Content-Length": "100"}, b"")
    answers = iter([(503, {}, b"busy"), lost, (200, {}, wire.encode_json(FILE)), (200, {}, wire.encode_json(FILE))])
    with server(lambda: next(answers), sent=sent) as url, Client(url) as sdk:
        assert sdk.upload_file(path, expires_after_s=3600) == FILE
        assert sdk.upload_file(path.read_bytes(), filename="b.jsonl") == FILE
    names = ["purpose", "expires_after[anchor]", "expires_after[seconds]", "file"]
    for request, filename, fields in zip(
        sent, ["a.jsonl", "a.jsonl", "a.jsonl", "b.jsonl"], [names, names, names, names[::3]], strict=True
    ):
        boundary = request.body.split(b"\r\n", 1)[0][2:]
        head = b"Content-Type: multipart/form-data; boundary=" + boundary + b"\r\n\r\n"
        form = {str(part.get_param("name", header="Content-Disposition")): part for part in _parts(head + request.body)}
        assert sorted(form) == sorted(fields)
        assert form["file"].get_filename() == filename
        assert form["file"].get_payload(decode=True) == path.read_bytes()


def _parts(text: bytes) -> list:  # type: ignore[type-arg]
    return list(message_from_bytes(text).get_payload())


def test_the_lines_of_a_file_go_on_where_the_reply_was_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_batches, "RESUME_S", 0.0)
    sent: list[Sent] = []
    cut_off = {"Content-Length": "100"}
    answers = iter([(200, cut_off, b"a\nbc\nde"), (200, cut_off, b""), (200, {}, b"def\n\ng")])
    with server(lambda: next(answers), sent=sent) as url, Client(url) as sdk:
        assert list(sdk.file_lines("file-1", offset=3)) == [b"a", b"bc", b"def", b"", b"g"]
    assert [request.path for request in sent] == [f"/v1/files/file-1/content?offset={n}" for n in (3, 5, 5)]


def test_a_slow_reader_of_a_file_does_not_use_up_the_time_of_its_server():
    answers = iter([(200, {"Content-Length": "100"}, b"a\n"), (200, {}, b"b\n")])
    with server(lambda: next(answers)) as url, Client(url, retry_s=0.1) as sdk:
        lines = sdk.file_lines("file-1")
        assert next(lines) == b"a"
        time.sleep(0.3)
        assert list(lines) == [b"b"]


def test_a_file_that_is_always_cut_off_is_given_up():
    with (
        server(lambda: (200, {"Content-Length": "100"}, b"a")) as url,
        Client(url, retry_s=0.3) as sdk,
        pytest.raises(Unreachable, match=f"no answer from {url}"),
    ):
        list(sdk.file_lines("file-1"))


def test_a_batch_is_created_once_although_a_reply_is_lost():
    sent: list[Sent] = []
    answers = iter([(200, {"Content-Length": "100"}, b""), (200, {}, wire.encode_json(BATCH))])
    with server(lambda: next(answers), sent=sent) as url, Client(url) as sdk:
        assert sdk.create_batch("file-1", "/v1/completions", output_expires_after_s=3600) == BATCH
    one, other = (wire.parse(request.body, wire.CreateBatch, "msgpack") for request in sent)
    assert one == other
    assert one.output_expires_after == wire.ExpiresAfter(anchor="created_at", seconds=3600)


@pytest.mark.parametrize("window", ["60s", "24", "soon", "", "1.5h", "24h ", 24])
def test_a_completion_window_that_is_none_is_refused_before_any_request(window: str):
    with Client("http://127.0.0.1:9") as sdk, pytest.raises(ValueError, match="expected a number of minutes, hours or"):
        sdk.create_batch("file-1", "/v1/completions", completion_window=window)


def test_a_batch_is_awaited_until_it_ends_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_batches, "POLL_S", 0.01)
    replies = [
        BATCH,
        BATCH,
        wire.Batch(**{name: getattr(BATCH, name) for name in BATCH.__struct_fields__} | {"status": "expired"}),
    ]
    answers = iter(replies)

    def answer() -> Answer:
        return 200, {}, wire.encode_json(next(answers, BATCH))

    with server(answer) as url, Client(url) as sdk:
        assert sdk.wait_for_batch("batch_1").status == "expired"
        with pytest.raises(BatchTimeout, match=f"batch batch_1 at {url} is validating after 0.1 s, with 3 of 7 lines"):
            sdk.wait_for_batch("batch_1", timeout_s=0.1)
