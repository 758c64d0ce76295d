"""The result store in a folder, what it says of bad settings and of trouble, and its absence from other processes."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import obstore
import pytest

from scorepool.store import Settings, SettingsError
from scorepool.store.result_store import (
    ResultMissing,
    ResultStore,
    ResultStoreError,
    inline_result_bytes,
    object_path,
    open_result_store,
    path_of_lease,
)
from tests.worker.conftest import until

PATH = "scorepool/ab/abc-1"


def opened(url: str) -> ResultStore:
    found = open_result_store(Settings(result_store=url))
    assert found is not None
    return found


def read(store: ResultStore, path: str = PATH) -> tuple[int, bytes]:
    async def read() -> tuple[int, bytes]:
        size, chunks = await store.open(path)
        return size, b"".join([chunk async for chunk in chunks])

    return asyncio.run(read())


def test_an_object_is_written_read_and_deleted(tmp_path: Path):
    store, body = opened(tmp_path.as_uri()), os.urandom(3_000_000)
    store.put(PATH, body)
    assert store.get(PATH) == body
    assert read(store) == (len(body), body)
    assert (tmp_path / PATH).read_bytes() == body

    (tmp_path / f"{PATH}#1").write_bytes(b"left by a process that was killed")
    for _ in range(2):  # the second finds nothing
        asyncio.run(store.delete(PATH))
    assert list((tmp_path / PATH).parent.iterdir()) == []
    with pytest.raises(ResultMissing):
        store.get(PATH)
    with pytest.raises(ResultMissing):
        read(store)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://[", "Invalid IPv6 URL"),
        ("/srv/results", "expected a URL that begins with file://, s3://, gs://, az://"),
        ("http://example.com/", "expected a URL that begins with"),
        ("file:///no/such/folder", "expected the URL of a folder that exists"),
        ("file://other-host/tmp", "expected the URL of a folder that exists"),
        ("s3://", "SCOREPOOL_RESULT_STORE='s3://': "),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(url: str, message: str):
    with pytest.raises(SettingsError) as error:
        open_result_store(Settings(result_store=url))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_takes_no_file_is_reported_in_a_sentence(tmp_path: Path):
    store = opened(tmp_path.as_uri())
    (tmp_path / "scorepool").write_bytes(b"")  # a file in the place of a folder
    with pytest.raises(ResultStoreError) as error:
        store.put(PATH, b"x")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


def test_a_folder_that_vanishes_is_trouble_and_not_an_absent_object(tmp_path: Path):
    folder = tmp_path / "share"
    folder.mkdir()
    store = opened(folder.as_uri())
    store.put(PATH, b"x")
    folder.rename(tmp_path / "away")
    for attempt in (
        lambda: store.put(PATH, b"y"),
        lambda: store.get(PATH),
        lambda: read(store),
        lambda: asyncio.run(store.delete(PATH)),
    ):
        with pytest.raises(ResultStoreError, match="share is not there") as error:
            attempt()
        assert not isinstance(error.value, ResultMissing)
    assert not folder.exists()  # it is not made anew on this disk
    (tmp_path / "away").rename(folder)
    assert store.get(PATH) == b"x"


def test_a_share_that_is_unmounted_is_trouble_although_its_folder_stays(tmp_path: Path):
    share = tmp_path / "share"
    share.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(share)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        (share / "results").mkdir()
        store = opened((share / "results").as_uri())
        store.put(PATH, b"x")
    finally:
        subprocess.run(["umount", str(share)], check=True)
    (share / "results").mkdir()  # as somebody may have made it before the share was mounted
    for attempt in (
        lambda: store.put(PATH, b"y"),
        lambda: store.get(PATH),
        lambda: read(store),
        lambda: asyncio.run(store.delete(PATH)),
    ):
        with pytest.raises(ResultStoreError, match="results is not there") as error:
            attempt()
        assert not isinstance(error.value, ResultMissing)
    assert list((share / "results").iterdir()) == []  # nothing is written beneath


def test_a_write_that_ends_in_the_middle_leaves_no_object(tmp_path: Path):
    store = opened(tmp_path.as_uri())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk: a write fails after some bytes
    try:
        with pytest.raises(ResultStoreError) as error:
            store.put(PATH, b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    with pytest.raises(ResultMissing):
        store.get(PATH)
    store.put(PATH, b"y" * 100_000)
    assert store.get(PATH) == b"y" * 100_000


def test_a_file_that_becomes_shorter_while_it_is_read_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.store.object_store.FOLDER_TIMEOUT_S", 1.0)
    store = opened(tmp_path.as_uri())
    store.put(PATH, bytes(2**23))

    async def read_and_truncate() -> None:
        _, chunks = await store.open(PATH)
        assert await anext(chunks)
        os.truncate(tmp_path / PATH, 2**22)
        async for _ in chunks:
            pass

    with pytest.raises(ResultStoreError, match="has not answered for 1 s"):
        asyncio.run(asyncio.wait_for(read_and_truncate(), 30))


def test_a_folder_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = opened(tmp_path.as_uri())
    store.put(PATH, b"x")
    monkeypatch.setattr("scorepool.store.object_store.FOLDER_TIMEOUT_S", 1.0)
    answers, put = Event(), obstore.put

    def put_late(*args: Any, **options: Any) -> None:
        answers.wait()
        put(*args, **options)

    monkeypatch.setattr(obstore, "put", put_late)
    for attempt in (lambda: store.put(f"{PATH}2", b"y"), lambda: store.put(f"{PATH}2", b"y"), lambda: store.get(PATH)):
        with pytest.raises(ResultStoreError, match="does not answer") as error:
            attempt()
        assert not isinstance(error.value, ResultMissing)
    answers.set()
    until(lambda: is_read(store))
    with pytest.raises(ResultMissing):  # its writer has been told that it is not written
        store.get(f"{PATH}2")
    store.put(f"{PATH}2", b"z")
    assert store.get(f"{PATH}2") == b"z"


def test_a_file_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = opened(tmp_path.as_uri())
    store.put(PATH, b"x")
    monkeypatch.setattr("scorepool.store.object_store.FOLDER_TIMEOUT_S", 1.0)
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", PATH):
        with pytest.raises(ResultStoreError, match="does not answer"):
            store.get(path)
    os.close(os.open(tmp_path / "pipe", os.O_RDWR))  # who opens it goes on
    until(lambda: is_read(store))


def is_read(store: ResultStore) -> bool:
    try:
        return store.get(PATH) == b"x"
    except ResultStoreError:
        return False


def test_a_server_that_does_not_answer_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    names = {"ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in names.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(ResultStoreError, match="S3") as error:
        opened("s3://bucket/results").put(PATH, b"x")
    assert "\n" not in str(error.value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a server of an object that is sent in eight chunks. One below `stalls` is sent to its half only."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in (("Content-Length", "8"), ("ETag", "1"), ("Last-Modified", formatdate(0, usegmt=True))):
                self.send_header(name, value)
            self.end_headers()
            for number in range(8):
                if number == 4 and "stalls" in self.path:
                    ends.wait()
                self.wfile.write(b"x")
                ends.wait(0.2)

        def log_message(self, *args: Any) -> None:
            pass

    ends = Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        names = {"ENDPOINT_URL": url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
        for name, value in names.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        Thread(target=server.serve_forever, daemon=True).start()
        yield "s3://bucket"
        ends.set()
        server.shutdown()


def test_a_slow_object_of_a_server_is_read_to_its_end_and_a_stalled_one_given_up(
    bucket: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.store.object_store.TIMEOUT_S", 1)
    monkeypatch.setattr("scorepool.store.object_store.READ_TIMEOUT_S", 1)
    store = opened(bucket)
    assert store.get("slow") == b"x" * 8
    assert read(store, "slow") == (8, b"x" * 8)
    for attempt in (lambda: store.get("stalls"), lambda: read(store, "stalls")):
        with pytest.raises(ResultStoreError, match="S3") as error:
            attempt()
        assert not isinstance(error.value, ResultMissing)


def test_ids_from_redis_name_no_other_file():
    assert object_path("ab" * 16, "e1") == path_of_lease(f"{'ab' * 16}:e1")
    for lease_key in ("../../etc:1", "ab:../x", "ab", "ab:", ":1", "a/b:1"):
        with pytest.raises(ValueError, match="no ids"):
            path_of_lease(lease_key)


def test_results_leave_redis_earlier_beside_a_store(tmp_path: Path):
    assert open_result_store(Settings()) is None
    assert inline_result_bytes(Settings()) == 2**28
    assert inline_result_bytes(Settings(result_store=tmp_path.as_uri())) == 2**20
    assert inline_result_bytes(Settings(max_inline_result_bytes=5)) == 5
