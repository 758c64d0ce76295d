"""Webhook receivers on loopback: an HTTP server with scripted responses, and a raw TCP server."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Received:
    """One request that a receiver got."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """Responds with `answers` in order, (status, headers) each, and repeats the last one."""

    port: int
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=lambda: [(204, {})])
    received: list[Received] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)  # requested by TLS SNI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=hush"


@contextmanager
def receiver(tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Receiver]:
    """Run an HTTP server on loopback, with TLS if a context is given, and on a free port if none is."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            this.received.append(Received(self.path, dict(self.headers.items()), body))
            status, headers = this.answers.pop(0) if len(this.answers) > 1 else this.answers[0]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that close the connection, such as one that rejects the certificate."""

    with Server(("127.0.0.1", port), Handler) as server:
        this = Receiver(server.server_port)
        if tls is not None:
            tls.sni_callback = lambda _socket, name, _context: this.names.append(name)
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield this
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port. `talk` is called with the first connection; an OSError of the connection ends it."""

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # no client connected
            return
        with connection:
            try:
                talk(connection)
            except OSError:  # the client closed the connection
                return

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
