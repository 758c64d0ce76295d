"""`allowed_token_ids` and `bad_words` of every generation: what is sampled, and whose logprobs are reported."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from scorepool import Client, JobFailed
from scorepool.local.stack import Stack
from tests.engine.oracle import Oracle

PROMPT = [1209, 274, 312, 885]
ALLOWED = [7, 31, 274, 312, 885, 1209]
T = 0.6
Generated = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


def completion(http: httpx.Client, **options: Any) -> Generated:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "return_token_ids": True} | options
    [choice] = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def chat(http: httpx.Client, **options: Any) -> Generated:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "logprobs": True}
    [choice] = http.post("/v1/chat/completions", json=body | {"return_token_ids": True} | options).json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def tokens(http: httpx.Client, **options: Any) -> Generated:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "logprobs": 0} | options}
    [choice] = http.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def job(http: httpx.Client, **options: Any) -> Generated:
    with Client(str(http.base_url)) as client:
        [sequence] = client.generate("demo", PROMPT, **{"max_tokens": 8} | options).sequences
    return sequence.token_ids, sequence.logprobs.values()


ROUTES = pytest.mark.parametrize("generate", [completion, chat, tokens, job])


@ROUTES
def test_only_allowed_tokens_are_generated(http: httpx.Client, generate: Callable[..., Generated]):
    token_ids, _ = generate(http, allowed_token_ids=ALLOWED, seed=3)

    assert len(token_ids) == 8
    assert set(token_ids) <= set(ALLOWED)


@ROUTES
def test_a_bad_word_is_not_generated(http: httpx.Client, demo_folder: Path, generate: Callable[..., Generated]):
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    options = {"temperature": 0, "ignore_eos": True}
    before, _ = generate(http, **options)
    word = next(text for text in map(tokenizer.decode, before) if len(tokenizer.encode(text)) == 1 and text.strip())

    after, _ = generate(http, **options, bad_words=[word])

    spellings = {tokenizer.encode(spelling)[0] for spelling in (word.lstrip(), " " + word.lstrip())}
    assert spellings & set(before)
    assert not spellings & set(after)


@pytest.mark.parametrize("generate", [completion, tokens, job])
def test_raw_logprobs_are_the_models_and_processed_ones_those_of_the_allowed_tokens(
    http: httpx.Client, demo_folder: Path, generate: Callable[..., Generated]
):
    oracle = Oracle(demo_folder)
    for mode in ("raw_logprobs", "processed_logprobs"):
        options = {"temperature": T, "allowed_token_ids": ALLOWED, "logprobs_mode": mode, "seed": 5}
        token_ids, logprobs = generate(http, **options)

        rows = oracle.logprobs(PROMPT + token_ids, 1.0 if mode == "raw_logprobs" else T)[len(PROMPT) - 1 : -1]
        if mode == "processed_logprobs":
            rows = rows - np.logaddexp.reduce(rows[:, ALLOWED], axis=-1, keepdims=True)
        assert logprobs == pytest.approx(rows[np.arange(8), token_ids], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"allowed_token_ids": [5, 5000]}, "allowed_token_ids", "below 3072, found 5000"),
        ({"allowed_token_ids": [274], "stop_token_ids": [274], "min_tokens": 1}, "allowed_token_ids", "no token is"),
        ({"bad_words": ["no"], "response_format": {"type": "json_object"}}, "response_format", "nor `bad_words`"),
    ],
)
def test_what_leaves_no_token_is_refused_by_name(http: httpx.Client, options: dict[str, Any], field: str, says: str):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]} | options
    reply = http.post("/v1/chat/completions", json=body)

    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field
    assert says in error["message"]


def test_a_job_says_which_word_leaves_no_token(native: Client, demo_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    [token_id] = tokenizer.encode("re", add_special_tokens=False)

    with pytest.raises(JobFailed, match="allowed_token_ids: no token is left"):
        native.generate("demo", "a", allowed_token_ids=[token_id], bad_words=["re"])
