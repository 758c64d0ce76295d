"""A server of images on loopback, with paths that lie, dawdle and never end."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.images import image_bytes, png_header

PNG = image_bytes()
FILES: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/a.png": (200, {"content-type": "image/png"}, PNG),
    "/b.png": (200, {"content-type": "image/png"}, image_bytes(shade=9)),
    "/typed.html": (200, {"content-type": "text/html"}, PNG),
    "/page.png": (200, {"content-type": "image/png"}, b"<html>no image</html>"),
    "/film.png": (200, {"content-type": "image/png"}, b"\0\0\0\x18ftypmp42" + bytes(100)),
    "/empty.png": (200, {"content-type": "image/png"}, b""),
    "/cut.png": (200, {"content-type": "image/png", "content-length": "15000"}, PNG),
    "/claims.png": (200, {"content-type": "image/png", "content-length": str(2**40)}, PNG),
    "/large.png": (200, {"content-type": "image/png"}, PNG + bytes(50_000)),
    "/vast.png": (200, {"content-type": "image/png"}, png_header(50_000, 50_000)),
    "/dot.png": (200, {"content-type": "image/png"}, png_header(1, 1)),
    "/gzip.png": (200, {"content-encoding": "gzip"}, gzip.compress(PNG)),
    "/none.png": (404, {}, b"not here"),
    "/moved.png": (302, {"location": "/a.png"}, b""),
    "/loop.png": (307, {"location": "/loop.png"}, b""),
    "/inside.png": (302, {"location": "http://169.254.169.254/latest/meta-data/"}, b""),
    "/nowhere.png": (301, {"location": "http://[::1/"}, b""),
    "/heads.png": (200, {f"x-{number}": "a" * 1000 for number in range(200)}, PNG),
}


@dataclass
class ImageServer:
    """What it was asked, and what it serves."""

    port: int
    asked: list[str] = field(default_factory=list)
    files: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=lambda: dict(FILES))
    num_open: int = 0  # slow answers on their way

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def image_server() -> Iterator[ImageServer]:
    stopped = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            this.asked.append(self.path)
            self.close_connection = True
            if path.startswith("/slow"):
                self.send(200, {}, b"")
                self.drip(b"\x89", 0.02)
            elif path.startswith("/silent"):
                stopped.wait(20)
            elif path == "/endless.png":
                self.send(200, {}, PNG)
                self.drip(bytes(10_000), 0)
            elif path == "/chunks.png":  # of one byte each
                self.send(200, {"transfer-encoding": "chunked"}, b"")
                self.drip(b"1\r\na\r\n" * 500, 0)
            else:
                status, headers, body = this.files[path]
                self.send(status, {"content-length": str(len(body))} | headers, body)

        def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def drip(self, data: bytes, pause_s: float) -> None:
            this.num_open += 1
            try:
                while not stopped.is_set():
                    self.wfile.write(data)
                    time.sleep(pause_s)
            finally:
                this.num_open -= 1

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: object) -> None:
            """Ignore clients that close the connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        this = ImageServer(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield this
        finally:
            stopped.set()
            server.shutdown()
            thread.join()
