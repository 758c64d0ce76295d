"""Tinker's own SDK samples and scores, unmodified, against the running stack."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest
import tinker
from tinker import types

from scorepool import Client, wire
from scorepool.api.dialects.tinker.reply import has_shown
from scorepool.api.dialects.tinker.sample import Future
from scorepool.local.stack import Stack
from tests.api.fake_worker import PROVENANCE

pytestmark = pytest.mark.filterwarnings("ignore")  # of the SDK, which leaves sockets and loops open
IDS = [5 + place * 37 % 900 for place in range(40)]
PROMPT = types.ModelInput.from_ints(IDS)


@pytest.fixture(scope="module")
def sampler(stack: Stack) -> Iterator[tinker.SamplingClient]:
    service = tinker.ServiceClient(base_url=stack.url, api_key="tml-none")
    yield service.create_sampling_client(base_model="demo")
    service.close("success").result()


def test_logprobs_of_a_prompt_are_those_of_the_native_job(sampler: tinker.SamplingClient, native: Client):
    found = sampler.compute_logprobs(PROMPT).result()

    [expected] = native.score("demo", [(IDS[:1], IDS[1:])], score="all").sequences
    assert found[0] is None
    assert found[1:] == pytest.approx(expected.logprobs.values()[1:], abs=1e-4)
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=7).result()
    assert last[:-7] == [None] * 33
    assert last[-7:] == pytest.approx(found[-7:], abs=1e-4)


def test_samples_have_their_logprobs_and_the_most_likely_tokens(sampler: tinker.SamplingClient, native: Client):
    params = types.SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    answer = sampler.sample(
        PROMPT, 4, params, include_prompt_logprobs=True, topk_prompt_logprobs=5, topk_sample_logprobs=2
    ).result()

    expected = native.generate("demo", IDS, n=4, max_tokens=12, temperature=0.8, seed=3, top_logprobs=5)
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 4
    for sequence, one in zip(answer.sequences, expected.sequences, strict=True):
        columns = one.numpy()
        assert sequence.tokens == one.token_ids
        assert sequence.stop_reason == one.finish_reason
        assert sequence.logprobs == pytest.approx(one.logprobs.values(), abs=1e-4)
        assert (sequence.topk_logprobs_np.token_ids == columns["top_ids"][:, :2]).all()
        assert sequence.topk_logprobs_np.logprobs == pytest.approx(columns["top_logprobs"][:, :2], abs=1e-4)
    [scored] = native.score("demo", [(IDS[:1], IDS[1:])], top_logprobs=5).sequences
    top = answer.topk_prompt_logprobs_np
    assert top.token_ids.shape == (40, 5)
    assert (top.token_ids[1:] == scored.numpy()["top_ids"]).all()
    assert top.logprobs[1:] == pytest.approx(scored.numpy()["top_logprobs"], abs=1e-4)
    assert (top.logprobs[0] == numpy.float32(-99_999)).all()
    assert answer.prompt_logprobs[0] is None


def test_stops_end_a_sample(sampler: tinker.SamplingClient):
    params = {"max_tokens": 30, "temperature": 0.0}
    [whole] = sampler.sample(PROMPT, 1, types.SamplingParams(**params)).result().sequences
    stop = whole.tokens[3]
    [cut] = sampler.sample(PROMPT, 1, types.SamplingParams(**params, stop=[stop])).result().sequences

    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert cut.stop_reason == "stop"
    [endless] = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=200, seed=1, stop=[])).result().sequences
    assert (len(endless.tokens), endless.stop_reason) == (200, "length")


def test_a_stop_string_is_in_the_tokens(sampler: tinker.SamplingClient, native: Client):
    [whole] = native.generate("demo", IDS, max_tokens=30, temperature=0.0, logprobs=True).sequences
    stop = b"".join(whole.token_bytes[3:6]).decode()
    params = types.SamplingParams(max_tokens=30, temperature=0.0, stop=[stop])
    [cut] = sampler.sample(PROMPT, 1, params).result().sequences

    assert (cut.tokens, cut.stop_reason) == (whole.token_ids[: len(cut.tokens)], "stop")
    text = b"".join(whole.token_bytes[: len(cut.tokens)]).decode()
    assert text.count(stop) == 1
    assert text.endswith(stop)
    assert len(cut.logprobs) == len(cut.tokens)


def test_a_future_survives_the_death_of_the_worker_and_of_the_api(sampler: tinker.SamplingClient, stack: Stack):
    params = types.SamplingParams(max_tokens=300, seed=5, stop=[])
    [expected] = sampler.sample(PROMPT, 1, params).result().sequences
    other = types.SamplingParams(max_tokens=300, seed=6, stop=[])
    futures = [sampler.sample(PROMPT, 1, each) for each in [other] * 8 + [params]]
    for name in ("worker demo", "api"):
        os.kill(stack.pid(name), signal.SIGKILL)

    async def revive() -> list[Any]:
        tasks = [asyncio.wrap_future(future.future()) for future in futures]
        while not all(task.done() for task in tasks):
            stack.restart_dead()
            await asyncio.sleep(0.2)
        return await asyncio.gather(*tasks)

    *_, answer = asyncio.run(revive())
    assert answer.sequences[0].tokens == expected.tokens


def ask(http: httpx.Client, **changes: Any) -> httpx.Response:
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]}, "sampling_params": {"max_tokens": 1}}
    return http.post("/api/v1/asample", json={"base_model": "demo"} | body | changes)


def test_the_same_request_has_one_future(http: httpx.Client):
    session = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "demo"}
    sampler_id = http.post("/api/v1/create_sampling_session", json=session).json()["sampling_session_id"]
    assert http.get(f"/api/v1/samplers/{sampler_id}").json()["base_model"] == "demo"
    named = {"base_model": None, "sampling_session_id": sampler_id, "seq_id": 1}
    first, again, other = (ask(http, **named | {"seq_id": number}).json() for number in (1, 1, 2))

    assert first == again
    assert first["request_id"] != other["request_id"]
    conflict = ask(http, **named, num_samples=2)
    assert conflict.status_code == 409


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"prompt_alt_tokens_k": 2}, None, "`prompt_alt_tokens_k` is not supported here, expected 0"),
        ({"model_path": "tinker://a"}, "model_path", "null"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks[0].type", "encoded_text"),
        ({"prompt": {"chunks": []}}, "prompt", "needs a token"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 10**6]}]}}, "prompt", "1000000"),
        ({"topk_prompt_logprobs": 3}, None, "needs `prompt_logprobs`"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 40}, "prompt_logprobs_last_n", "less than the 40"),
        ({"topk_sample_logprobs": 2000}, "topk_sample_logprobs", "1024"),
        ({"num_samples": 0}, "num_samples", ">= 1"),
        ({"base_model": "none"}, "model", "none"),
    ],
)
def test_what_cannot_be_answered_is_named(http: httpx.Client, changes: Any, field: str | None, reason: str):
    answer = ask(http, **changes)

    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert reason in error["message"]
    if field is not None:
        assert field in (error["field"] or error["message"])


def test_a_failed_job_is_a_failed_future(http: httpx.Client):
    long = {"chunks": [{"type": "encoded_text", "tokens": [5] * 2048}]}
    request_id = ask(http, prompt=long, sampling_params={"max_tokens": 100}).json().get("request_id")
    if request_id is None:  # refused at once
        return
    answer = http.post("/api/v1/retrieve_future", json={"request_id": request_id}).json()
    assert answer["category"] == "user"
    assert "2048" in answer["error"]


def test_a_future_that_is_none_is_not_found(http: httpx.Client):
    for request_id in ("a", "a.1.0.0.0", "0" * 32 + ".2.0.0.0"):
        answer = http.post("/api/v1/retrieve_future", json={"request_id": request_id})
        assert answer.status_code == 404


@pytest.mark.parametrize("options", [{"logprobs": False}, {"packed": True}, {"prompt_logprobs": False}])
def test_a_job_without_what_a_future_shows_is_none(http: httpx.Client, options: dict[str, Any]):
    body = {"type": "generate", "model": "demo", "prompt": IDS, "max_tokens": 1, "prompt_logprobs": True}
    job_id = http.post("/v1/jobs", json=body | options).json()["id"]
    answer = http.post("/api/v1/retrieve_future", json={"request_id": f"{job_id}.1.0.0.0"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "request_id")


@pytest.mark.parametrize("numbers", ["1.1025.0.0", "1.0.99999.0", "1.1.0.0", "1.0.1.0"])
def test_a_future_shows_no_more_tokens_than_were_asked_for(http: httpx.Client, numbers: str):
    job_id, _, _ = ask(http, prompt_logprobs=True).json()["request_id"].partition(".")
    answer = http.post("/api/v1/retrieve_future", json={"request_id": f"{job_id}.{numbers}"})
    assert answer.status_code == 404


def test_a_future_shows_no_more_top_logprobs_than_a_job_may_report():
    num_tokens = 8192
    sequence = wire.SequenceResult(
        text="",
        token_ids=[5] * num_tokens,
        token_bytes=[b"a"] * num_tokens,
        logprobs=wire.Floats([0.0] * num_tokens),
        top_ids=[[5]] * num_tokens,
    )
    usage = wire.Usage(prompt_tokens=1, completion_tokens=num_tokens)
    result = wire.Result(sequences=[sequence], temperature=1.0, usage=usage, stamp=PROVENANCE)

    assert has_shown(Future.parse("a.0.0.512.0"), result)
    assert not has_shown(Future.parse("a.0.0.513.0"), result)
