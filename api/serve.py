"""Run the application under uvicorn, on loopback or a unix socket unless it has keys."""

import asyncio
import logging
import socket
import time

import uvicorn

from scorepool.api.app import create_app
from scorepool.api.connection import check_login
from scorepool.api.http.loopback import is_loopback
from scorepool.api.http.protocol import Protocol
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.state import State
from scorepool.api.unix_socket import UnixSocket
from scorepool.store import Settings, SettingsError

logger = logging.getLogger(__name__)

ACCEPT_ERROR_INTERVAL_S = 10.0
SHUTDOWN_GRACE_S = (
    8  # for bodies and replies under way, of 10 s in all; clients that wait for a job are answered at once
)


class Server(uvicorn.Server):
    """Answer waiting clients when the server is asked to stop, instead of running on for up to max_wait_s."""

    def __init__(self, config: uvicorn.Config, waiting: Waiting, unix_socket: UnixSocket | None) -> None:
        super().__init__(config)
        self._waiting = waiting
        self._unix_socket = unix_socket

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._unix_socket is not None:  # here, because uvicorn ends the process by the signal that it was sent
            self._unix_socket.remove()
        self._waiting.release()
        await super().shutdown(sockets)


def tidy_access_log(record: logging.LogRecord) -> bool:
    """Cut the query string off a line of uvicorn's access log, because a client may have put its key there.

    False if the line is about a health check, of which there is one every few seconds.
    """
    if not (isinstance(record.args, tuple) and len(record.args) == 5):
        return True
    client, method, target, *rest = record.args
    path = str(target).partition("?")[0]
    record.args = (client, method, path, *rest)
    return path not in ("/healthz", "/readyz", "/health", "/metrics")


class AcceptErrorFilter(logging.Filter):
    """Log one line per ACCEPT_ERROR_INTERVAL_S while the process has no file descriptor for new connections.

    asyncio tries again once a second, and then logs a traceback for each of uvicorn's 2,048 places in the backlog. It
    logs as many if the server was closed meanwhile, and has nothing to accept any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -ACCEPT_ERROR_INTERVAL_S

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message.startswith("Exception in callback") and "._start_serving(" in message:
            return False
        if not message.startswith("socket.accept() out of system resource"):
            return True
        if time.monotonic() - self._logged_at < ACCEPT_ERROR_INTERVAL_S:
            return False
        self._logged_at = time.monotonic()
        record.msg, record.args = "no file descriptor is left for new connections (`ulimit -n`)", ()
        record.exc_info = record.exc_text = None
        return True


def serve(settings: Settings) -> None:
    """Serve until the server is asked to stop. Raises SettingsError before it listens."""
    app = create_app(settings)
    state: State = app.state.scorepool
    if not state.keyring and not settings.uds and not is_loopback(settings.host):
        raise SettingsError(
            f"SCOREPOOL_HOST={settings.host!r} without API keys would let everyone who reaches it submit jobs. "
            "Set SCOREPOOL_API_KEYS or SCOREPOOL_API_KEYS_FILE (`scorepool key NAME` makes one), "
            "or listen on 127.0.0.1"
        )
    asyncio.run(check_login(settings.redis_url))
    # The level is set on our own logger only: at DEBUG the root logger would print every library's lines.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("scorepool.api").setLevel(settings.log_level)
    logging.getLogger("uvicorn.access").addFilter(tidy_access_log)
    logging.getLogger("asyncio").addFilter(AcceptErrorFilter())
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=Protocol,
        ws="none",
        log_level=settings.log_level.lower(),
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    if not settings.uds:
        Server(config, state.waiting, None).run()
        return
    unix_socket = UnixSocket.listen(settings.uds)
    try:
        logger.info("listening on the unix socket %s", unix_socket.path)
        Server(config, state.waiting, unix_socket).run(sockets=[unix_socket.listener])
    finally:
        unix_socket.remove()
