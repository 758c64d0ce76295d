"""Run the application under uvicorn, on loopback or a unix socket unless it has keys."""

import asyncio
import gc
import logging
import socket
import time
from http import HTTPStatus

import uvicorn

from scorepool.api.app import create_app
from scorepool.api.connection import check_logins
from scorepool.api.http.loopback import is_loopback
from scorepool.api.http.openapi import VERSION
from scorepool.api.http.protocol import Protocol
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.state import State
from scorepool.api.unix_socket import UnixSocket
from scorepool.store import Settings, SettingsError, logs

logger = logging.getLogger(__name__)

HEALTH_CHECKS = ("/healthz", "/readyz", "/health", "/metrics")
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

    A read that succeeds has level DEBUG, because clients poll jobs. So has every check of the health, which machines
    poll. Return False if such lines are not logged.
    """
    if not (isinstance(record.args, tuple) and len(record.args) == 5):
        return True
    client, method, target, version, status = record.args
    path = str(target).partition("?")[0]
    record.args = (client, method, path, version, status)
    is_read = method in ("GET", "HEAD") and isinstance(status, int) and status < HTTPStatus.BAD_REQUEST
    if is_read or path in HEALTH_CHECKS:
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


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


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of the host, and send each write at once. Raises SettingsError.

    uvicorn writes the head and the body of a reply apart. Under Nagle's algorithm the body waits for the client to
    acknowledge the head, which most kernels delay by 40 ms. asyncio sets TCP_NODELAY only on sockets that name their
    protocol, and `socket.create_server` does not: connections inherit the option from the listener.
    """
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            listener = socket.create_server(address[:2], family=family)
            listeners.append(listener)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        for listener in listeners:
            listener.close()
        reason = error.strerror or error
        raise SettingsError(f"cannot listen on SCOREPOOL_HOST={host!r}, SCOREPOOL_PORT={port}: {reason}") from None
    return listeners


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
    logs.configure("api", settings.log_format, settings.log_level)
    asyncio.run(check_logins(state.servers))
    logger.info("scorepool %s starts", VERSION)
    logging.getLogger("uvicorn.access").addFilter(tidy_access_log)
    logging.getLogger("asyncio").addFilter(AcceptErrorFilter())
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=Protocol,
        ws="none",
        log_config=None,  # its lines go where ours go
        log_level=settings.log_level.lower(),
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    gc.collect()
    gc.freeze()  # a full collection looks at what requests made: at everything it would stop all of them for 60 ms
    if not settings.uds:
        listeners = listen(settings.host, settings.port)
        for listener in listeners:
            host, port, *_ = listener.getsockname()
            logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        Server(config, state.waiting, None).run(sockets=listeners)
        return
    unix_socket = UnixSocket.listen(settings.uds)
    try:
        logger.info("listening on the unix socket %s", unix_socket.path)
        Server(config, state.waiting, unix_socket).run(sockets=[unix_socket.listener])
    finally:
        unix_socket.remove()
