"""The page of models: what each worker holds and how it computes."""

import re

import pytest
from redis import Redis

from scorepool import wire
from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio


async def test_each_model_is_shown_with_its_workers(serving: Serving, worker: FakeWorker, redis: Redis):
    worker.register(aliases=["tiny"], context_length=4096)
    stopped = wire.CrosscheckStatus(share=0.1, difference=None, stopped="two workers found other logprobs")
    FakeWorker(redis, name="w2").register(crosscheck=stopped)
    FakeWorker(redis, model="org/other", name="w3").register()
    async with serving() as http:
        text = (await http.get("/served-models")).text

    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == ["demo", "org/other"]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", text)]
    assert [row[:2] for row in rows] == [["w1", "ok"], ["w2", "stopped by a crosscheck"], ["w3", "ok"]]
    assert rows[0][2:] == ["2026-11-18 11:06:40 UTC", "passed", "default", "float32", "none", "–", "f" * 12, "–", "–"]
    assert rows[1][-1] == "two workers found other logprobs"
    assert "<dd>4,096</dd>" in text
    assert "<dd>tiny</dd>" in text
    assert "different weights" not in text
    assert 'href="/jobs?model=org%2Fother"' in text or 'href="/jobs?model=org/other"' in text


async def test_workers_with_other_weights_are_told_apart(serving: Serving, worker: FakeWorker, redis: Redis):
    other = FakeWorker(redis, name="w2")
    other.register(fingerprint="e" * 16)
    async with serving() as http:
        assert "hold 2 different weights" in (await http.get("/served-models")).text


async def test_without_a_worker_it_says_how_to_start_one(serving: Serving):
    async with serving() as http:
        assert "No worker has a model loaded yet" in (await http.get("/served-models")).text


async def test_names_are_text(serving: Serving, redis: Redis):
    name = "<script>alert(1)</script>\"'"
    FakeWorker(redis, model=name, name=name).register(aliases=[name])
    async with serving() as http:
        text = (await http.get("/served-models")).text

    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
