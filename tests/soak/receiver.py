"""Receive webhooks: log every POST, and answer 500 to the first attempt of some."""

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scorepool import WebhookError, verify_webhook
from tests.soak.log import Log

FAIL_ONE_IN = 20  # one message in so many gets 500 for its first attempt


@contextmanager
def receiver(secrets: Sequence[str], log: Log) -> Iterator[str]:
    """Run the receiver and yield its URL."""
    failed: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            webhook_id = headers["webhook-id"]
            try:
                verify_webhook(body, headers, secrets)
                is_signed = True
            except WebhookError:
                is_signed = False
            status = 204
            if zlib.crc32(webhook_id.encode()) % FAIL_ONE_IN == 0 and webhook_id not in failed:
                failed.add(webhook_id)
                status = 500
            log.write("delivery", id=webhook_id, body=body.decode(), is_signed=is_signed, status=status)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore connections that a killed sender closed."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()
        thread.join()
