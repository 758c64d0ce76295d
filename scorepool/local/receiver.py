"""Receive the demo's webhooks on loopback and verify their signatures."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from standardwebhooks import Webhook, WebhookVerificationError

MAX_BODY_BYTES = 20_000


class Receiver:
    """A context in which a webhook server runs. `verified` gets the payload of each delivery with a valid signature."""

    def __init__(self, secret: str) -> None:
        self.verified: SimpleQueue[dict[str, Any]] = SimpleQueue()
        webhook, verified = Webhook(secret), self.verified

        class Endpoint(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), MAX_BODY_BYTES))
                try:
                    payload = webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
                except WebhookVerificationError:
                    self.send_response(400)
                else:
                    verified.put(payload)
                    self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write no access log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        self.url = f"http://127.0.0.1:{self._server.server_port}/scorepool"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
