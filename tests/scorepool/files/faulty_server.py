"""Run a server whose jobs end at once, and which does not answer every request as it should."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.soak.fake_server import FakeServer

Reply = tuple[int, bytes]
# Of a method and a path: the reply in the place of the right one. CUT: the right one, of which half arrives.
Fault = Callable[[str, str], Reply | None]
CUT: Reply = (0, b"")


@contextmanager
def faulty_server(fault: Fault, port: int = 0) -> Iterator[str]:
    """Yield the URL."""
    fake, lock = FakeServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            path = self.path.partition("?")[0]
            found = fault(self.command, path)
            with lock:
                status, reply = found if found and found != CUT else fake.answer(self.command, path, body)
            if found == CUT:
                self.close_connection = True
                if not reply:
                    return
            self.send_response(status)
            self.send_header("Content-Type", "application/msgpack")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if found == CUT else reply)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 200
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,)).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
