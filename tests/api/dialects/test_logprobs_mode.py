"""`logprobs_mode`: raw logprobs are the model's own, processed ones are those at the temperature, in every dialect."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scorepool import Client, wire
from scorepool.local.stack import Stack
from scorepool.wire.columns import LogprobsMode
from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker
from tests.engine.oracle import Oracle

PROMPT = [1209, 274, 312, 885]
T = 0.6
Post = Callable[..., dict[str, Any]]


@pytest.fixture
def post(stack: Stack) -> Iterator[Post]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:

        def send(path: str, **body: Any) -> dict[str, Any]:
            reply = http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            found: dict[str, Any] = reply.json()
            return found

        yield send


@pytest.fixture(scope="module")
def oracle(demo_folder: Path) -> Oracle:
    return Oracle(demo_folder)


def expected(oracle: Oracle, token_ids: list[int], temperature: float) -> np.ndarray:
    """Return transformers' log_softmax(logits / temperature) of each token but the first."""
    rows = oracle.logprobs(token_ids, temperature)[:-1]
    return rows[np.arange(len(rows)), token_ids[1:]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_importance_ratio_of_a_generation_and_its_prompt_logprobs_is_one(post: Post, oracle: Oracle, mode: str):
    """The check of trl issue 4159: a policy that samples at 0.6 and scores its own tokens at 0.6."""
    common = {"model": "demo", "temperature": T, "logprobs_mode": mode}
    generated = post(
        "/v1/completions", **common, prompt=PROMPT, max_tokens=24, logprobs=0, seed=1, return_token_ids=True
    )
    [choice] = generated["choices"]
    sampled = choice["logprobs"]["token_logprobs"]
    token_ids = PROMPT + choice["token_ids"]
    scored = post("/v1/completions", **common, prompt=token_ids, max_tokens=1, prompt_logprobs=0)

    entries = scored["choices"][0]["prompt_logprobs"]
    rescored = [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries[1:], token_ids[1:], strict=True)]
    ratio = math.exp(math.fsum(rescored[len(PROMPT) - 1 :]) - math.fsum(sampled))
    assert ratio == pytest.approx(1, abs=1e-3)
    assert (generated["logprobs_mode"], scored["logprobs_mode"]) == (mode, mode)
    divisor = T if mode == "processed_logprobs" else 1.0
    assert rescored == pytest.approx(expected(oracle, token_ids, divisor), abs=1e-4)
    other = expected(oracle, token_ids, 1.0 if mode == "processed_logprobs" else T)
    assert abs(math.exp(math.fsum(rescored) - math.fsum(other)) - 1) > 0.1  # the modes differ on these tokens


def test_a_native_job_and_each_dialect_report_the_same(post: Post, native: Client, oracle: Oracle):
    job = native.generate(
        "demo", PROMPT, max_tokens=6, temperature=T, seed=3, prompt_logprobs=True, logprobs_mode="processed_logprobs"
    )
    [sequence] = job.sequences
    assert (job.temperature, job.logprobs_mode) == (T, "processed_logprobs")
    assert sequence.logprobs is not None
    found = sequence.logprobs[1:]
    assert found == pytest.approx(expected(oracle, sequence.token_ids, T), abs=1e-4)
    assert sequence.sampled_logprobs is not None
    assert found[len(PROMPT) - 1 :] == pytest.approx(sequence.sampled_logprobs, abs=1e-5)

    [score] = native.score("demo", [(sequence.token_ids[:1], sequence.token_ids[1:])], temperature=T).sequences
    assert score.logprobs == pytest.approx(found, abs=1e-4)

    params = {"max_new_tokens": 6, "temperature": T, "sampling_seed": 3}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    meta = post("/generate", **body, logprobs_mode="processed_logprobs")["meta_info"]
    entries = [value for value, *_ in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    assert entries == pytest.approx(found, abs=1e-5)
    assert meta["logprobs_mode"] == "processed_logprobs"

    echoed = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": T, "seed": 3, "echo": True}
    reply = post("/v1/completions", **echoed, logprobs=0, logprobs_mode="processed_logprobs")
    assert reply["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(found, abs=1e-5)


def test_processed_logprobs_are_those_of_the_distribution_that_filters_leave(native: Client):
    [sequence] = native.generate(
        "demo", PROMPT, max_tokens=20, temperature=1.3, top_k=3, seed=3, logprobs_mode="processed_logprobs",
        top_logprobs=5,
    ).sequences  # fmt: skip

    assert sequence.logprobs is not None
    assert sequence.top_logprobs is not None
    assert sequence.logprobs == pytest.approx(sequence.sampled_logprobs, abs=1e-5)
    for top in sequence.top_logprobs:
        assert math.fsum(map(math.exp, top[:3])) == pytest.approx(1, abs=1e-5)
        assert list(top[3:]) == [-9999.0, -9999.0]
    assert sequence.clamped == 40


def events(stack: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", stack.url + path, json=body | {"stream": True}, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_streams_name_the_mode_in_the_last_chunk_of_a_choice(stack: Stack, oracle: Oracle):
    common = {"model": "demo", "max_tokens": 5, "temperature": T, "seed": 2, "logprobs_mode": "processed_logprobs"}
    echoed = events(stack, "/v1/completions", common | {"prompt": PROMPT, "echo": True, "logprobs": 0})
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "return_token_ids": True}
    answered = events(stack, "/v1/chat/completions", common | chat)
    silent = events(stack, "/v1/completions", common | {"prompt": PROMPT})

    for chunks in (echoed, answered):
        assert [chunk.get("logprobs_mode") for chunk in chunks] == [None] * (len(chunks) - 1) + ["processed_logprobs"]
    assert not any("logprobs_mode" in chunk for chunk in silent)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in echoed]
    found = [value for each in logprobs for value in each["token_logprobs"]]
    texts = [token for each in logprobs for token in each["tokens"]]
    assert len(found) == len(texts) == len(PROMPT) + 5
    assert found[1 : len(PROMPT)] == pytest.approx(expected(oracle, PROMPT, T), abs=1e-4)
    choices = [chunk["choices"][0] for chunk in answered]
    prompt_ids = answered[-1]["prompt_token_ids"]
    token_ids = prompt_ids + [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    values = [each["logprob"] for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert values == pytest.approx(expected(oracle, token_ids, T)[len(prompt_ids) - 1 :], abs=1e-4)


@pytest.mark.anyio
@pytest.mark.parametrize("default", ["raw_logprobs", "processed_logprobs"])
async def test_the_setting_is_the_mode_of_requests_that_choose_none(
    serving: Serving, worker: FakeWorker, default: LogprobsMode
):
    body = {"type": "generate", "model": "demo", "prompt": "a", "temperature": T}
    async with serving(logprobs_mode=default) as http:
        headers = {"Idempotency-Key": "one"}
        first = await http.post("/v1/jobs", json=body, headers=headers)
        raw = await http.post("/v1/jobs", json=body | {"logprobs_mode": "raw_logprobs"})
        greedy = await http.post("/v1/jobs", json=body | {"temperature": 0.0})
        silent = await http.post("/v1/jobs", json=body | {"temperature": 0.0, "logprobs": False})
    async with serving() as http:  # with the other default the same request is the same submission
        again = await http.post("/v1/jobs", json=body, headers=headers)

    def stored(reply: httpx.Response) -> wire.Request:
        return worker.start(reply.json()["id"])

    assert (first.status_code, raw.status_code, silent.status_code, again.status_code) == (202,) * 4
    assert first.json()["id"] == again.json()["id"]
    mode = stored(first).logprobs_mode  # type: ignore[union-attr]
    assert mode == (None if default == "raw_logprobs" else default)  # null is raw for a worker
    assert stored(raw).logprobs_mode == "raw_logprobs"  # type: ignore[union-attr]
    assert stored(silent).logprobs_mode is None  # type: ignore[union-attr]
    assert greedy.status_code == (202 if default == "raw_logprobs" else 400)
    assert default == "raw_logprobs" or greedy.json()["error"]["field"] == "temperature"


def test_a_temperature_of_zero_that_would_divide_is_refused_by_the_name_of_its_field(stack: Stack):
    mode = {"logprobs_mode": "processed_logprobs"}
    for path, body, param in [
        ("/v1/completions", {"model": "demo", "prompt": ["a", "b"], "logprobs": 0, "temperature": 0}, "temperature"),
        ("/generate", {"text": "a", "return_logprob": True, "sampling_params": {"temperature": 0}}, "sampling_params"),
    ]:
        reply = httpx.post(stack.url + path, json=body | mode, timeout=60)

        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith(param)
        assert "found 0; raw_logprobs goes with 0" in reply.json()["error"]["message"]
