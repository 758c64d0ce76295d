"""vLLM's `/inference/v1/generate` as prime-rl, SkyRL and TRL send it, compared with native jobs."""

import json
import math
import threading
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest

from scorepool import Client, wire
from scorepool.api.dialects.vllm.generate import GenerateTokensRequest, to_request
from scorepool.local.stack import Stack

PATH = "/inference/v1/generate"
PROMPT = [1209, 274, 312, 885, 16, 305]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 6}


def post(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prime_rl_reads_the_logprob_of_each_token_of_a_prompt(http: httpx.Client, native: Client):
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}

    answer = post(http, {"model": "demo", "token_ids": PROMPT, "sampling_params": params})

    [job] = native.generate("demo", PROMPT, max_tokens=1, prompt_logprobs=True, top_logprobs=1, rank=True).sequences
    [scored] = native.score("demo", [(PROMPT[:1], PROMPT[1:])]).sequences
    split = len(PROMPT)
    first, *entries = answer["prompt_logprobs"]
    assert first is None
    found = [next(iter(entry.values())) for entry in entries]  # prime-rl takes the first of an entry
    assert [entry["logprob"] for entry in found] == pytest.approx(job.logprobs.values()[1:split], abs=1e-6)
    assert [entry["logprob"] for entry in found] == pytest.approx(scored.logprobs.values(), abs=1e-5)
    assert [entry["rank"] for entry in found] == job.ranks[1:split]
    assert [set(map(int, entry)) for entry in entries] == [
        {token_id, *top} for token_id, top in zip(PROMPT[1:], job.top_ids[1:split], strict=True)
    ]
    assert len(answer["choices"][0]["token_ids"]) == 1


@pytest.mark.parametrize("k", [0, 3])
def test_skyrl_samples_with_the_logprobs_of_prompt_and_samples(http: httpx.Client, native: Client, k: int):
    params = {"n": 3, "logprobs": 0, "output_kind": 2, "prompt_logprobs": k} | SAMPLED
    body = {"model": "demo", "token_ids": PROMPT, "sampling_params": params}
    answer = http.post(PATH, json=body, headers={"X-Session-ID": "s-1"}).json()

    job = native.generate("demo", PROMPT, n=3, prompt_logprobs=True, top_logprobs=k, **SAMPLED)
    split = len(PROMPT)
    assert len(answer["choices"]) == 3
    for index, (choice, sequence) in enumerate(zip(answer["choices"], job.sequences, strict=True)):
        assert choice["index"] == index
        assert choice["token_ids"] == sequence.token_ids[split:]
        assert choice["finish_reason"] == sequence.finish_reason
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found == pytest.approx(sequence.logprobs.values()[split:], abs=1e-6)
    [sequence, *_] = job.sequences
    own = [(entry or {}).get(str(token_id)) for token_id, entry in zip(PROMPT, answer["prompt_logprobs"], strict=True)]
    assert own[0] is None
    assert [entry["logprob"] for entry in own[1:]] == pytest.approx(sequence.logprobs.values()[1:split], abs=1e-6)
    for position in range(1, split):
        by_id = {int(token_id): entry["logprob"] for token_id, entry in answer["prompt_logprobs"][position].items()}
        most_likely = sorted(by_id.items(), key=lambda pair: -pair[1])[:k]
        expected = zip(sequence.top_ids[position], sequence.top_logprobs[position], strict=True) if k else ()
        assert dict(most_likely) == pytest.approx(dict(expected), abs=1e-6)
    assert answer["usage"] == {"prompt_tokens": split, "completion_tokens": 18, "total_tokens": split + 18}


def test_trl_reads_token_ids_out_of_the_entries(http: httpx.Client, native: Client):
    body = {"request_id": "trl-0", "model": "demo", "token_ids": PROMPT, "features": None}
    params = {"n": 1, "repetition_penalty": 1.0, "min_p": 0.0, "logprobs": 2, "output_kind": 2}

    [choice] = post(http, body | {"sampling_params": params | SAMPLED})["choices"]

    [sequence] = native.generate("demo", PROMPT, top_logprobs=2, **SAMPLED).sequences
    for entry, content in enumerate(choice["logprobs"]["content"]):
        tops = {top["token"]: top["logprob"] for top in content["top_logprobs"]}
        own = {sequence.token_ids[entry]: sequence.logprobs[entry]}
        expected = own | dict(zip(sequence.top_ids[entry], sequence.top_logprobs[entry], strict=True))
        assert tops == pytest.approx({f"token_id:{token_id}": value for token_id, value in expected.items()}, abs=1e-6)
        assert next(iter(tops)) == content["token"] == f"token_id:{content['token_id']}"
        assert len({top["token_id"] for top in content["top_logprobs"]}) == len(content["top_logprobs"])


def test_a_prompt_is_scored_without_generating(http: httpx.Client):
    params = {"max_tokens": 0, "prompt_logprobs": 0}

    answer = post(http, {"token_ids": PROMPT, "sampling_params": params, "return_token_ids": True})

    assert [list(map(int, entry or ())) for entry in answer["prompt_logprobs"]] == [
        [],
        *([each] for each in PROMPT[1:]),
    ]
    assert answer["prompt_token_ids"] == PROMPT
    assert [(choice["token_ids"], choice["logprobs"]) for choice in answer["choices"]] == [([], None)]
    assert answer["model"] == "demo"
    assert answer["system_fingerprint"].startswith("fp_")


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_the_chunks_of_a_stream_join_to_the_answer(http: httpx.Client, mode: str):
    params = {"n": 2, "logprobs": 1, "stop": ["zzzz"]} | SAMPLED | {"max_tokens": 20}
    body = {"token_ids": PROMPT, "sampling_params": params, "output_mode": mode, "return_token_ids": True}
    whole = post(http, body)

    lines = http.post(PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text.split("\n\n")

    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    *chunks, last = map(json.loads, events[:-1])
    assert events[-1] == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    token_ids: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    texts: dict[int, str] = defaultdict(str)
    ends = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        token_ids[choice["index"]] += choice["token_ids"]
        logprobs[choice["index"]] += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        texts[choice["index"]] += choice.get("text", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = (choice["finish_reason"], chunk["prompt_token_ids"])
    for choice in whole["choices"]:
        index = choice["index"]
        assert token_ids[index] == choice["token_ids"]
        assert logprobs[index] == pytest.approx([each["logprob"] for each in choice["logprobs"]["content"]], abs=1e-4)
        assert ends[index] == (choice["finish_reason"], PROMPT)
        assert texts[index] == choice.get("text", "")
        joined = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert (joined == choice.get("text")) == (mode == "text")


def test_a_request_id_gets_the_same_answer_again(http: httpx.Client):
    body = {"request_id": "r 1", "token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "logprobs": 0}}

    first, again = post(http, body), post(http, body)  # without a seed
    streamed = http.post(PATH, json=body | {"stream": True})
    other = http.post(PATH, json=body | {"token_ids": PROMPT[1:]})
    unnamed = post(http, {name: value for name, value in body.items() if name != "request_id"})

    assert first["request_id"] == "r 1"
    assert again["choices"] == first["choices"]
    assert (other.status_code, other.json()["error"]["param"]) == (409, "request_id")
    assert streamed.status_code == 409  # `stream` is part of the body
    assert unnamed["request_id"] != first["request_id"]


def test_a_client_that_disconnects_gets_the_answer_of_its_request_id(http: httpx.Client, stack: Stack, native: Client):
    params = {"max_tokens": 250, "ignore_eos": True, "seed": 3}
    body = {"request_id": "gone", "token_ids": PROMPT, "sampling_params": params}

    def leave() -> None:
        with httpx.Client(base_url=stack.url) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post(PATH, json=body, timeout=httpx.Timeout(60, read=0.2))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    time.sleep(0.2)  # the server has noticed
    answer = post(http, body)

    [sequence] = native.generate("demo", PROMPT, **params).sequences
    assert [choice["token_ids"] for choice in answer["choices"]] == [sequence.token_ids]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"token_ids": []}, "token_ids", "length >= 1"),
        ({"token_ids": [5, 99_999]}, "token_ids[1]", "expected a token id below"),
        ({"features": {"mm_hashes": {}}}, "features", "not supported here, expected null"),
        ({"priority": "high"}, "priority", "Expected `int | null`"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supported here"),
        ({"unheard_of": 1}, "unheard_of", "unknown field"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs", "be streamed"),
        (
            {"sampling_params": {"structured_outputs": {"regex": "(a"}}},
            "sampling_params.structured_outputs.regex",
            "unclosed",
        ),
        ({"sampling_params": {"prompt_logprobs": -2}}, "sampling_params.prompt_logprobs", ">= -1"),
        ({"sampling_params": {"max_tokens": 99_999}}, "sampling_params.max_tokens", "the model's context"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", "needs `prompt_logprobs`"),
        ({"sampling_params": {"stop": "a", "detokenize": False}}, "sampling_params.detokenize", "`detokenize`"),
        ({"sampling_params": {"stop_token_ids": [99_999]}}, "sampling_params.stop_token_ids", "token ids below"),
        ({"model": "nobody"}, "model", "nobody"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    http: httpx.Client, change: dict[str, Any], param: str | None, message: str
):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}} | change

    answer = http.post(PATH, json=body)

    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_defaults_of_vllm_pass(http: httpx.Client):
    defaults = {"presence_penalty": 0.0, "seed": -1, "bad_words": [], "detokenize": True, "stream_interval": None}
    defaults |= {"flat_logprobs": False, "structured_outputs": None, "routed_experts_prompt_start": 0, "top_k": -1}
    body = {"token_ids": PROMPT, "sampling_params": defaults | {"max_tokens": 2}}
    post(http, body | {"cache_salt": None, "priority": 0, "output_mode": "tokens", "token_offsets": [[0, 1]]})


def test_the_callers_ids_and_processed_logprobs_are_those_of_a_native_job(http: httpx.Client, native: Client):
    wanted, mode = [5, 900], "processed_logprobs"
    params = {"logprobs": 0, "logprob_token_ids": wanted, "logprobs_mode": mode} | SAMPLED

    answer = post(http, {"token_ids": PROMPT, "sampling_params": params, "cache_salt": "session 1"})

    [sequence] = native.generate("demo", PROMPT, targets=wanted, logprobs_mode=mode, **SAMPLED).sequences
    assert answer["logprobs_mode"] == mode
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(sequence.logprobs.values(), abs=1e-6)
    for entry, logprobs in zip(content, sequence.target_logprobs, strict=True):
        own, *others = entry["top_logprobs"]
        assert own["token_id"] == entry["token_id"]
        expected = [pair for pair in zip(wanted, logprobs.values(), strict=True) if pair[0] != entry["token_id"]]
        assert [(each["token_id"], each["logprob"]) for each in others] == expected


def test_the_whole_vocabulary_is_reported(http: httpx.Client):
    answer = post(http, {"token_ids": PROMPT[:3], "sampling_params": {"max_tokens": 1, "logprobs": -1, "seed": 1}})

    [entry] = answer["choices"][0]["logprobs"]["content"]
    by_id = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
    assert len(by_id) == len(entry["top_logprobs"]) == 3072  # the demo model's vocabulary
    assert sum(map(math.exp, by_id.values())) == pytest.approx(1, abs=1e-4)


def test_the_salt_of_a_request_is_that_of_its_job():
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_tokens": 2}}
    for asked, expected in (({"cache_salt": "session 1"}, "session 1"), ({}, None), ({"cache_salt": ""}, None)):
        parsed = wire.parse(wire.encode_json(body | asked), GenerateTokensRequest)
        assert to_request(parsed, "demo", 60).cache_salt == expected
