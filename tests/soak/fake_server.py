"""Serve the routes of the API that the file commands use, and compute nothing: `python -m tests.soak.fake_server PORT`.

The logprob of an item is minus the number that its prompt is. At most MAX_LIVE jobs may be there at a time.
`GET /counts` is for the test.
"""

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from scorepool import wire
from tests.api.fake_worker import PROVENANCE

MAX_LIVE = 400  # several times the jobs of a second: the client deletes them at each checkpoint
MODELS = wire.ModelList(
    models=[
        wire.ServedModel(
            id="demo",
            stamp=PROVENANCE,
            context_length=4096,
            vocab_size=1000,
            self_test="passed",
            worker="w1",
            aliases=[],
            created=1_795_000_000,
            tokenizer=wire.TokenizerInfo(bos_token=None, eos_token="</s>", pad_token=None, chat_template=None),
        )
    ]
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class FakeServer:
    """An ASGI application that keeps jobs until they are deleted."""

    def __init__(self) -> None:
        self._jobs: dict[str, wire.Job] = {}
        self._num_submitted = self._num_deleted = self._max_live = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await read(receive)
        status, reply = self.answer(scope["method"], urlsplit(scope["path"]).path, body)
        headers = [(b"content-type", b"application/msgpack"), (b"content-length", str(len(reply)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the HTTP status and the content of a reply."""
        job_id = path.removeprefix("/v1/jobs/")
        match method:
            case "POST" if path == "/v1/jobs" and len(self._jobs) < MAX_LIVE:
                return 202, self._submit(wire.parse(body, wire.Score, "msgpack"))
            case "GET" if path == "/v1/models":
                return 200, wire.encode(MODELS)
            case "GET" if path == "/counts":
                counts = [self._num_submitted, self._num_deleted, self._max_live, len(self._jobs)]
                return 200, " ".join(map(str, counts)).encode()
            case "GET" if job_id in self._jobs:
                return 200, wire.encode(self._jobs[job_id])
            case "DELETE" if job_id in self._jobs:
                del self._jobs[job_id]
                self._num_deleted += 1
                return 204, b""
        return 403, f"{method} {path} with {len(self._jobs)} jobs".encode()

    def _submit(self, request: wire.Score) -> bytes:
        self._num_submitted += 1
        job_id = f"j{self._num_submitted}"
        self._jobs[job_id] = wire.Job(
            id=job_id, kind="score", model="demo", status="finished", created_at=0.0, result=result(request)
        )
        self._max_live = max(self._max_live, len(self._jobs))
        return wire.encode(wire.Accepted(id=job_id, status="queued", location=f"/v1/jobs/{job_id}"))


def result(request: wire.Score) -> wire.Result:
    """Return the result of a job."""
    return wire.Result(
        sequences=[sequence(item) for item in request.items],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=len(request.items), completion_tokens=len(request.items)),
        stamp=PROVENANCE,
    )


def sequence(item: wire.ScoreItem) -> wire.SequenceResult:
    """Return what the item scores."""
    return wire.SequenceResult(
        token_ids=[2],
        token_bytes=[str(item.completion).encode()],
        text=str(item.completion),
        logprobs=wire.Floats([-float(str(item.prompt))]),
        ranks=[1],
        num_prompt_tokens=1,
    )


async def read(receive: Receive) -> bytes:
    """Return the body of a request."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


if __name__ == "__main__":
    uvicorn.run(FakeServer(), port=int(sys.argv[1]), access_log=False, log_level="warning")
