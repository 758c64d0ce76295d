"""A client of a stream gets every token once, in order and soon, when links, workers and Redis fail; or is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from scorepool import store
from tests.api.test_process import running, serves
from tests.fleet.fleet import Fleet, until
from tests.fleet.link import Link

STEP_S = 0.02
NUM_TOKENS = 400  # take so long that a busy machine sees what happens before the end
PACE = {"FLEET_STEP_S": f"{STEP_S}", "FLEET_TOKEN_S": "0", "SCOREPOOL_LEASE_S": "1"}
TEXT = "abcdefghijklmnopqrstuvwxyz"
OTHER = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # another text after 26 tokens


class Client:
    """A client that reads one stream of server-sent events on a thread: the tokens so far, and what was said."""

    def __init__(self, url: str, body: dict[str, Any] | None = None, last_event_id: str = "") -> None:
        self.text = ""
        self.num_logprobs = 0
        self.restarts: list[str] = []  # the text before each restart
        self.end: dict[str, Any] | None = None  # the last event's data
        self.last_event_id = last_event_id
        self._arrivals: list[tuple[float, int]] = []  # (time.monotonic(), number of tokens)
        self._request = ("POST", url, body) if body else ("GET", url, None)
        self._is_closed = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._thread.join()

    def num_at(self, moment: float) -> int:
        return max((num for at, num in self._arrivals if at <= moment), default=0)

    def _read(self) -> None:
        method, url, body = self._request
        headers = {"Last-Event-ID": self.last_event_id} if self.last_event_id else {}
        with httpx.stream(method, url, json=body, headers=headers, timeout=60, trust_env=False) as reply:
            event = "message"
            for line in reply.iter_lines():
                name, _, value = line.partition(": ")
                if not line:
                    event = "message"
                elif name == "event":
                    event = value
                elif name == "id":
                    self.last_event_id = value
                elif name == "data" and value != "[DONE]":
                    self._on_event(event, json.loads(value))
                if self._is_closed:
                    return

    def _on_event(self, event: str, data: dict[str, Any]) -> None:
        if event == "tokens":
            assert data["first"] == len(self.text)
            assert len(data["logprobs"]) == len(data["token_ids"])
            self.text += bytes(data["token_ids"]).decode()
        elif event == "restart":
            self.restarts.append(self.text)
            self.text = ""
        elif event == "message" and "choices" in data:
            self.text += "".join(choice["text"] for choice in data["choices"])
        else:
            self.end = data
        self._arrivals.append((time.monotonic(), len(self.text)))

    def wait_for(self, num_tokens: int, timeout_s: float = 120.0) -> None:
        until(lambda: len(self.text) >= num_tokens, timeout_s)

    def wait_for_end(self, timeout_s: float = 120.0) -> dict[str, Any]:
        until(lambda: self.end is not None, timeout_s)
        assert self.end is not None
        return self.end


class Setup:
    """A fleet with an API."""

    def __init__(self, fleet: Fleet, link: Link, http: httpx.Client) -> None:
        self.fleet, self.link, self.http = fleet, link, http  # the API's link to Redis

    def submit(self, num_tokens: int) -> str:
        body = {"type": "generate", "model": "demo", "prompt": "a", "max_tokens": num_tokens, "stream": True}
        return str(self.http.post("/v1/jobs", json=body).json()["id"])

    def follow(self, job_id: str, last_event_id: str = "") -> Client:
        return Client(f"{self.http.base_url}/v1/jobs/{job_id}/events".replace("//v1", "/v1"), None, last_event_id)

    def complete(self, num_tokens: int) -> Client:
        body = {"model": "demo", "prompt": "a", "max_tokens": num_tokens, "stream": True}
        return Client(f"{self.http.base_url}/v1/completions".replace("//v1", "/v1"), body)

    def holders(self) -> set[str]:
        """Return the names of the workers that hold jobs."""
        redis = self.fleet.redis
        registries = [store.RqKeys.registry("wip", queue) for queue in store.queue_names("demo")]
        lease_keys = [key.decode() for registry in registries for key in redis.zrange(registry, 0, -1)]
        names = [redis.hget(store.RqKeys.execution(lease_key), "worker_name") for lease_key in lease_keys]
        return {name.decode() for name in names if name}


MakeSetup = Callable[..., Any]


@pytest.fixture
def setup(root: Path, tmp_path: Path) -> MakeSetup:
    @contextmanager
    def make(*texts: str, **settings: str) -> Iterator[Setup]:
        """Start an API and a worker for each text, which it generates."""
        with (
            Fleet(tmp_path, PACE | settings) as fleet,
            Link(fleet.server.url) as link,
            running(root, link.url, tmp_path / "api.log") as (http, _),
        ):
            for name, text in zip("abc", texts, strict=False):
                fleet.host(name, FLEET_TEXT=text)
                fleet.wait_until_up()
            until(lambda: serves(http, "demo"))
            yield Setup(fleet, link, http)

    return make


def text_of(num_tokens: int, text: str = TEXT) -> str:
    return (text * (num_tokens // len(text) + 1))[:num_tokens]


@pytest.mark.parametrize("kind", [pytest.param("pause", marks=pytest.mark.soak), "drop"])
@pytest.mark.soak
def test_tokens_of_a_hole_come_soon_after_it(setup: MakeSetup, kind: str):
    with setup(TEXT, SCOREPOOL_LEASE_S="20") as one:
        (host,) = one.fleet.hosts
        with one.follow(one.submit(450)) as client:
            client.wait_for(20)
            host.link.pause() if kind == "pause" else host.link.drop()
            time.sleep(3)
            num_before = len(client.text)
            host.link.restore()
            over_at = time.monotonic()
            client.wait_for(num_before + int(3 / STEP_S * 0.8), 2.5)
            end = client.wait_for_end()
        assert client.end is not None
        assert time.monotonic() - over_at > 3  # long before the end of the job
        assert client.text == text_of(450)
        assert client.restarts == []
        assert end["status"] == "finished"


@pytest.mark.parametrize("kind", [pytest.param("pause", marks=pytest.mark.soak), "drop"])
def test_tokens_of_a_hole_in_the_link_of_the_api_come_after_it(setup: MakeSetup, kind: str):
    lease = {"SCOREPOOL_LEASE_S": "200"}
    with setup(TEXT, **lease) as one, one.follow(one.submit(500)) as client, one.complete(500) as completion:
        client.wait_for(20)
        completion.wait_for(20)
        (host,) = one.fleet.hosts

        def num_steps() -> int:
            return host.stats()[-1].steps

        one.link.pause() if kind == "pause" else one.link.drop()
        num_before = num_steps()
        until(lambda: num_steps() > num_before + 100)
        num_computed = num_steps() - num_before
        until(lambda: num_steps() > num_before + num_computed + 10)  # what was computed has been written to Redis
        host.stop()  # what comes now was computed in the hole
        one.link.restore()
        client.wait_for(20 + num_computed)
        completion.wait_for(20 + num_computed)
        host.wake()
        client.wait_for_end()
        until(lambda: len(completion.text) == 500 or completion.end)

    assert (client.text, client.restarts) == (text_of(500), [])
    assert (completion.text, completion.end) == (text_of(500), None)


@pytest.mark.soak
def test_a_stream_survives_a_restart_of_redis(setup: MakeSetup):
    """The restart loses the stream of tokens, and perhaps deltas that no API process has read."""
    with setup(TEXT) as one, one.follow(one.submit(400)) as client, one.complete(400) as completion:
        client.wait_for(30)
        completion.wait_for(30)
        server = one.fleet.server
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        time.sleep(0.5)
        server.start()
        is_back_at, num_before = time.monotonic(), len(client.text)
        client.wait_for(num_before + 50, 5)
        client.wait_for_end()
        until(lambda: len(completion.text) == 400)

    assert client.num_at(is_back_at + 4) < 400  # it did not come with the result
    assert (client.text, client.restarts) == (text_of(400), [])
    assert completion.text == text_of(400)


@pytest.mark.parametrize("fault", [pytest.param("kill", marks=pytest.mark.soak), "nap"])
def test_a_takeover_continues_the_stream(setup: MakeSetup, fault: str):
    """The late tokens of a worker that wakes after the takeover are not mixed with those of the next."""
    with setup(TEXT, TEXT) as one, one.follow(one.submit(NUM_TOKENS)) as client:
        client.wait_for(60)
        (worker,) = [host for host in one.fleet.hosts if host.name in one.holders()]
        worker.kill() if fault == "kill" else worker.stop()
        until(lambda: one.holders() - {worker.name})
        num_then = len(client.text)
        if fault == "nap":
            worker.wake()
        client.wait_for(num_then + 20)
        assert client.end is None
        client.wait_for_end()

    assert (client.text, client.restarts) == (text_of(NUM_TOKENS), [])


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        *(("events", "nap"), ("completions", "kill")),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("events", "kill"), ("completions", "nap"))),
    ],
)
def test_a_takeover_with_other_tokens_says_that_the_stream_began_again(setup: MakeSetup, route: str, fault: str):
    with (
        setup(TEXT) as one,
        one.follow(one.submit(NUM_TOKENS)) if route == "events" else one.complete(NUM_TOKENS) as client,
    ):
        client.wait_for(60)
        (worker,) = one.fleet.hosts
        worker.kill() if fault == "kill" else worker.stop()
        num_then = len(client.text)
        one.fleet.host("b", FLEET_TEXT=OTHER)
        until(lambda: one.holders() == {"b"})
        if fault == "nap":
            worker.wake()
        end = client.wait_for_end()

    if route == "events":
        assert client.text == text_of(NUM_TOKENS, OTHER)
        assert client.restarts == [text_of(len(client.restarts[0]))]
        assert end["status"] == "finished"
    else:
        assert client.text == text_of(len(client.text))
        assert num_then <= len(client.text) < NUM_TOKENS
        assert "the job began again" in end["error"]["message"]


@pytest.mark.soak
def test_a_client_that_reconnects_after_a_takeover_with_other_tokens_is_told(setup: MakeSetup):
    with setup(TEXT) as one:
        job_id = one.submit(200)
        with one.follow(job_id) as client:
            client.wait_for(60)
        one.fleet.hosts[0].kill()
        one.fleet.host("b", FLEET_TEXT=OTHER)
        until(lambda: one.holders() == {"b"})
        with one.follow(job_id, client.last_event_id) as again:
            again.text = client.text
            again.wait_for_end()

    assert again.text == text_of(200, OTHER)
    assert again.restarts == [text_of(len(again.restarts[0]))]
