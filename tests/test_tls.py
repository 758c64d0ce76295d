"""Redis over TLS with a certificate of a private authority. The embedded server has no TLS: a proxy adds it."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

import scorepool.worker
from tests.api.conftest import generate
from tests.api.test_process import running
from tests.worker.conftest import Workers


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either side closes."""
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass  # the other side was killed
    finally:
        writer.close()


@pytest.fixture
def tls_port(redis_url: str, redis: Redis, tmp_path: Path) -> Iterator[int]:
    """Run a TLS proxy to Redis for 127.0.0.1; yield its port. Its authority is in `ca.pem`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    loop = asyncio.new_event_loop()
    opened: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(urlsplit(redis_url).path)
        opened.extend([writer, inner_writer])
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(forward, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    for writer in opened:
        if not writer.is_closing():
            writer.transport.abort()
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


def test_api_worker_and_tools_use_tls_with_an_authority_from_the_url(
    redis_url: str, tls_port: int, root: Path, tmp_path: Path
):
    user = "".join(urlsplit(redis_url).netloc.rpartition("@")[:2])
    url = f"rediss://{user}127.0.0.1:{tls_port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
    (tmp_path / "workers").mkdir()
    with Workers(url, root, tmp_path / "workers") as workers:
        workers.start("--connection-class", "scorepool.worker.Redis", "--with-scheduler")
        with running(root, url, tmp_path / "api.log") as (http, _):
            job_id = http.post("/v1/jobs", json=generate(max_tokens=3, wait_for_model=True)).json()["id"]
            assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["status"] == "finished"
            assert "1 finished" in workers.rq("info")


def test_a_certificate_of_an_unknown_authority_or_for_another_host_is_refused(tls_port: int, tmp_path: Path):
    other_authority = trustme.CA()
    other_authority.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    for host, authority in (("127.0.0.1", "other.pem"), ("localhost", "ca.pem")):
        url = f"rediss://{host}:{tls_port}/0?ssl_ca_certs={tmp_path / authority}"
        with (
            scorepool.worker.Redis.from_url(url, retry=None) as redis,
            pytest.raises(RedisConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            redis.ping()
