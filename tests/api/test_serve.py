"""A process without file descriptors logs one line per interval, not a traceback per place in the backlog."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from scorepool.api.serve import AcceptErrorFilter, tidy_access_log


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


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("/v1/jobs?api_key=hush&wait=5", '127.0.0.1:5 - "GET /v1/jobs HTTP/1.1" 401'),
        ("/v1/jobs", '127.0.0.1:5 - "GET /v1/jobs HTTP/1.1" 401'),
        ("/healthz?x", None),
    ],
)
def test_the_access_log_has_no_query_strings_and_no_health_checks(target: str, line: str | None):
    text = '%s - "%s %s HTTP/%s" %d'
    record = logging.LogRecord("uvicorn.access", 20, "", 1, text, ("127.0.0.1:5", "GET", target, "1.1", 401), None)
    assert tidy_access_log(record) == (line is not None)
    assert line is None or record.getMessage() == line
