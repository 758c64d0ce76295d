"""Receive the end of a job as a webhook, and refuse what is not signed with the endpoint's secret.

The server needs `SCOREPOOL_WEBHOOK_SECRET`, and for a receiver that is not at a public https address, as here,
`SCOREPOOL_WEBHOOK_ALLOW_PRIVATE=true`: put both before `make serve`, with the secret
`whsec_$(openssl rand -base64 32)`.

python examples/receive_webhooks.py [URL]
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

from scorepool import Client, Score, ScoreItem, WebhookError, verify_webhook

secrets: list[str] = []  # for a day after a rotation: the new one and the old one
events: Queue[object] = Queue()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))  # the bytes as they came: they are signed
        try:
            event = verify_webhook(body, dict(self.headers), secrets)
        except WebhookError as error:
            print(error, file=sys.stderr)
            self.send_response(400)
        else:
            events.put(event)  # reply at once, work later; the same `webhook-id` may come twice
            self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server, Client(*sys.argv[1:]) as client:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registered = client.register_endpoint(f"http://127.0.0.1:{server.server_port}/")
    secrets.append(registered.secret)
    job = client.submit(Score(model="demo", items=[ScoreItem(prompt="import", completion=" os")]))
    event = events.get(timeout=60)
    print(event.type, event.data.id == job.id, f"{job.result().sequences[0].logprob_sum:.3f}")
    client.delete_endpoint(registered.endpoint.id)
    server.shutdown()
