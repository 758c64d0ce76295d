"""`GET /v1/jobs/{id}/events` on the real stack, with a connection that is lost in the middle."""

import json
from typing import Any

import httpx

from scorepool.local.stack import Stack

NO_END = {"0": -100, "2": -100}  # bans both end tokens


def read(stack: Stack, id_: str, last: str | None, count: int | None) -> list[dict[str, Any]]:
    """Return the events until the end, or the first `count`."""
    headers = {} if last is None else {"Last-Event-ID": last}
    events: list[dict[str, Any]] = []
    event: dict[str, Any] = {}
    with httpx.stream("GET", f"{stack.url}/v1/jobs/{id_}/events", headers=headers, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
                continue
            if event:
                events.append(event | {"data": json.loads(event["data"])})
                event = {}
            if len(events) == count:
                break
    return events


def test_a_client_that_reconnects_gets_every_event_once(stack: Stack):
    job = {"type": "generate", "model": "demo", "prompt": "import", "n": 2, "max_tokens": 300, "stream": True}
    id_ = httpx.post(f"{stack.url}/v1/jobs", json=job | {"logit_bias": NO_END}, timeout=60).json()["id"]

    events: list[dict[str, Any]] = []
    for count in (3, 10, None):
        if (
            not events or events[-1]["event"] != "end"
        ):  # the events of a job that ended before it was read come from its result
            events += read(stack, id_, events[-1]["id"] if events else None, count)

    assert [event["event"] for event in events] == ["tokens"] * (len(events) - 1) + ["end"]
    result = events[-1]["data"]["result"]
    for sequence, scored in enumerate(result["sequences"]):
        parts = [event["data"] for event in events[:-1] if event["data"]["sequence"] == sequence]
        assert [token_id for part in parts for token_id in part["token_ids"]] == scored["token_ids"]
        assert [value for part in parts for value in part["logprobs"]] == scored["logprobs"]
    assert events[-1]["id"].partition("@")[0] == ",".join(
        str(len(scored["token_ids"])) for scored in result["sequences"]
    )


def test_the_events_of_an_ended_job_come_from_its_result(stack: Stack):
    job = {"type": "generate", "model": "demo", "prompt": "import", "max_tokens": 5}
    headers = {"Prefer": "wait=30"}
    ended = httpx.post(f"{stack.url}/v1/jobs", json=job, headers=headers, timeout=60).json()

    tokens, end = read(stack, ended["id"], None, None)

    assert tokens["data"]["token_ids"] == ended["result"]["sequences"][0]["token_ids"]
    assert end["data"] == ended
