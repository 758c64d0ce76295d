"""The caller's token ids: vLLM's `logprob_token_ids` and SGLang's `token_ids_logprob`, compared with transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from scorepool.local.stack import Stack
from tests.engine.oracle import Oracle

PROMPT = [1209, 274, 312, 885]
IDS = [305, 885, 16, 7]
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(stack: Stack) -> Iterator[Ask]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield lambda path, **body: http.post(path, json=body)


@pytest.fixture(scope="module")
def oracle(demo_folder: Path) -> Oracle:
    return Oracle(demo_folder)


@pytest.fixture(scope="module")
def words(demo_folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    return [tokenizer.decode([token_id]) for token_id in IDS]


def expected(oracle: Oracle, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return [len(token_ids) - 1, ids]: transformers' logprobs of the ids in the place of each token but the first."""
    return oracle.logprobs(token_ids, temperature)[:-1][:, IDS]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_completion_reports_the_ids_in_place_of_the_most_likely_tokens(sdk: OpenAI, oracle: Oracle, mode: str):
    more = {"logprob_token_ids": IDS, "return_tokens_as_token_ids": True, "return_token_ids": True}
    completion = sdk.completions.create(
        model="demo", prompt=PROMPT, max_tokens=5, logprobs=2, seed=1, temperature=0.7,
        extra_body=more | {"logprobs_mode": mode},
    )  # fmt: skip

    [choice] = completion.choices
    token_ids = PROMPT + choice.token_ids  # type: ignore[attr-defined]
    rows = expected(oracle, token_ids, 0.7 if mode == "processed_logprobs" else 1.0)[len(PROMPT) - 1 :]
    assert choice.logprobs is not None
    tops = choice.logprobs.top_logprobs
    assert tops is not None
    for top, row, token, logprob in zip(
        tops, rows, choice.logprobs.tokens or [], choice.logprobs.token_logprobs or [], strict=True
    ):
        assert [top[f"token_id:{token_id}"] for token_id in IDS] == pytest.approx(row, abs=1e-4)
        assert top.keys() == {*(f"token_id:{token_id}" for token_id in IDS), token}
        assert top[token] == logprob


def test_an_echoed_prompt_keeps_its_most_likely_tokens(ask: Ask):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, "seed": 1, "logprobs": 2, "echo": True}
    plain = ask("/v1/completions", **body).json()["choices"][0]["logprobs"]["top_logprobs"]
    found = ask("/v1/completions", **body, logprob_token_ids=IDS).json()["choices"][0]["logprobs"]["top_logprobs"]
    none = ask("/v1/completions", **body, logprob_token_ids=[]).json()["choices"][0]["logprobs"]["top_logprobs"]

    for top, expected_top in zip(found[1 : len(PROMPT)], plain[1 : len(PROMPT)], strict=True):
        assert top == pytest.approx(expected_top, abs=1e-5)  # MLX computes them beside those of the ids, else NumPy
    assert found[0] is plain[0] is None
    assert all(len(top) >= len(IDS) for top in found[len(PROMPT) :])
    assert none == plain


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_reports_the_ids_with_their_text(sdk: OpenAI, oracle: Oracle, words: list[str], is_streamed: bool):
    options: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 150, "seed": 2, "logprobs": True}
    more = {"logprob_token_ids": IDS, "return_token_ids": True, "ignore_eos": True}
    if is_streamed:
        chunks = list(sdk.chat.completions.create(**options, top_logprobs=5, stream=True, extra_body=more))
        prompt_ids = chunks[-1].prompt_token_ids  # type: ignore[attr-defined]
        token_ids = [token_id for chunk in chunks for token_id in getattr(chunk.choices[0], "token_ids", None) or []]
        choices = [chunk.choices[0] for chunk in chunks]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
        assert sum(bool(choice.logprobs and choice.logprobs.content) for choice in choices) > 1  # it came in parts
    else:
        answer = sdk.chat.completions.create(**options, top_logprobs=5, extra_body=more)
        prompt_ids, token_ids = answer.prompt_token_ids, answer.choices[0].token_ids  # type: ignore[attr-defined]
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []

    rows = expected(oracle, prompt_ids + token_ids)[len(prompt_ids) - 1 :]
    for entry, row in zip(entries, rows, strict=True):
        assert [top.token for top in entry.top_logprobs] == words
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row, abs=1e-4)


def test_sglang_reports_the_ids_at_input_and_output(ask: Ask, oracle: Oracle, words: list[str]):
    params = {"max_new_tokens": 3, "sampling_seed": 4}
    body = {"sampling_params": params, "return_logprob": True, "logprob_start_len": 1}
    one = ask("/generate", input_ids=PROMPT, token_ids_logprob=IDS, return_text_in_logprobs=True, **body).json()
    lists = [[305, 885], [16]]
    two = ask("/generate", input_ids=[PROMPT, PROMPT[:3]], token_ids_logprob=lists, **body).json()
    none = ask("/generate", input_ids=PROMPT, token_ids_logprob=[], **body).json()

    meta = one["meta_info"]
    assert meta["input_token_ids_logprobs"][0] is None
    assert len(meta["input_token_ids_logprobs"]) == len(meta["input_token_logprobs"]) == len(PROMPT) - 1
    entries = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
    for entry, row in zip(entries, expected(oracle, PROMPT + one["output_ids"])[1:], strict=True):
        assert [token_id for _, token_id, _ in entry] == IDS
        assert [text for *_, text in entry] == words
        assert [value for value, *_ in entry] == pytest.approx(row, abs=1e-4)
    for answer, ids in zip(two, lists, strict=True):
        entries = answer["meta_info"]["output_token_ids_logprobs"]
        assert [[token_id for _, token_id, _ in entry] for entry in entries] == [ids] * 3
        assert all(text is None for entry in entries for *_, text in entry)
    assert "output_token_ids_logprobs" not in none["meta_info"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/completions", {"logprob_token_ids": [5, 99_999], "logprobs": 0}, "logprob_token_ids[1]"),
        ("/v1/completions", {"logprob_token_ids": [-1], "logprobs": 0}, "logprob_token_ids[0]"),
        ("/v1/completions", {"logprob_token_ids": [5] * 1025, "logprobs": 0}, "logprob_token_ids"),
        (
            "/v1/completions",
            {"logprob_token_ids": [5], "logprobs": 0, "echo": True, "max_tokens": 0},
            "logprob_token_ids",
        ),
        ("/v1/chat/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/chat/completions", {"logprob_token_ids": [5, 99_999], "logprobs": True}, "logprob_token_ids[1]"),
        ("/generate", {"token_ids_logprob": [5]}, "token_ids_logprob"),
        ("/generate", {"token_ids_logprob": [5, 99_999], "return_logprob": True}, "token_ids_logprob[1]"),
        ("/generate", {"token_ids_logprob": [[5], [5, 99_999]], "return_logprob": True}, "token_ids_logprob[1][1]"),
        ("/generate", {"token_ids_logprob": [[5]], "return_logprob": True}, "token_ids_logprob"),
        ("/generate", {"token_ids_logprob": [[5], 5], "return_logprob": True}, "token_ids_logprob"),
        ("/generate", {"token_ids_logprob": [5] * 1025, "return_logprob": True}, "token_ids_logprob"),
    ],
)
def test_wrong_ids_are_refused_by_their_field(ask: Ask, path: str, body: dict[str, Any], param: str):
    base: dict[str, Any] = {"model": "demo"}
    base |= {"text": ["a", "b"]} if path == "/generate" else {"messages": CHAT} if "chat" in path else {"prompt": "a"}

    reply = ask(path, **base, **body)

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
