"""A process without file descriptors logs one line per interval, not a traceback per place in the backlog."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from scorepool.api.serve import AcceptErrorFilter, listen, tidy_access_log
from scorepool.store import SettingsError


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """Let the process open no file until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts the descriptors in /proc")
def test_exhausted_file_descriptors_are_logged_in_one_line(no_descriptors: None, caplog: pytest.LogCaptureFixture):
    async def exhaust() -> None:
        log, accept_errors = logging.getLogger("asyncio"), AcceptErrorFilter()
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=2048)
        client = socket.socket()
        taken = []
        log.addFilter(accept_errors)
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            client.setblocking(False)
            client.connect_ex(server.sockets[0].getsockname())
            await asyncio.sleep(1.5)
        finally:
            for descriptor in taken:
                os.close(descriptor)
            client.close()
            server.close()
            await asyncio.sleep(1.5)  # asyncio tries again, to accept on a closed socket
            log.removeFilter(accept_errors)

    asyncio.run(exhaust())

    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == [
        "no file descriptor is left for new connections (`ulimit -n`)"
    ]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_the_access_log_has_no_query_strings_and_polls_at_debug_only(level: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(level, "uvicorn.access")

    def lines(method: str, target: str, status: int) -> list[tuple[str, str]]:
        args = ("127.0.0.1:5", method, target, "1.1", status)
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 1, '%s - "%s %s HTTP/%s" %d', args, None)
        return [(record.levelname, record.getMessage())] if tidy_access_log(record) else []

    read = ("DEBUG", '127.0.0.1:5 - "GET /v1/jobs HTTP/1.1" 200')
    assert lines("GET", "/v1/jobs?api_key=hush&wait=5", 200) == [read] * (level == logging.DEBUG)
    assert len(lines("HEAD", "/v1/jobs", 204)) == len(lines("GET", "/readyz?x", 503)) == (level == logging.DEBUG)
    assert lines("GET", "/v1/jobs?api_key=hush", 401) == [("INFO", '127.0.0.1:5 - "GET /v1/jobs HTTP/1.1" 401')]
    assert lines("POST", "/v1/jobs", 202) == [("INFO", '127.0.0.1:5 - "POST /v1/jobs HTTP/1.1" 202')]


def test_an_address_that_cannot_be_listened_on_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"SCOREPOOL_HOST='127.0.0.1', SCOREPOOL_PORT={port}: Address already"):
            listen("127.0.0.1", port)
    with pytest.raises(SettingsError, match=r"SCOREPOOL_HOST='no\.such\.invalid'"):
        listen("no.such.invalid", 1)


def test_a_connection_sends_the_body_of_a_reply_without_waiting_for_the_acknowledgement_of_its_head():
    (listener,) = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
