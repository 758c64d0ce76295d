"""TRL's released client of a vLLM server."""

import base64
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from scorepool import Client
from scorepool.local.stack import Stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from trl.generation import vllm_client
    from trl.generation.vllm_client import VLLMClient

pytestmark = pytest.mark.filterwarnings("ignore")

Ask = Callable[..., httpx.Response]
SEQUENCES = [[1209, 274, 312, 885], [5, 6, 7], [305, 16, 274, 274, 1209, 312]]
PROMPT_LENGTHS = [1, 2, 3]


@pytest.fixture
def trl(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> VLLMClient:
    # The client requires vLLM to be installed and uses nothing of it here.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    return VLLMClient(base_url=stack.url)


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 256}, {"top_logprobs": 5, "chunk_size": 1}])
def test_sequence_logprobs_of_a_teacher(trl: VLLMClient, stack: Stack, options: dict[str, Any]):
    found = trl.get_sequence_logprobs(SEQUENCES, PROMPT_LENGTHS, **options)

    k = options.get("top_logprobs", 100)
    with Client(stack.url) as native:
        items = [(ids[:length], ids[length:]) for ids, length in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
        expected = native.score("demo", items, top_logprobs=k).sequences
    for row, scored in enumerate(expected):
        assert found["actual_token_ids"][row] == [[token_id] for token_id in scored.token_ids]
        rank_is_high = [value in top.values() for value, top in zip(scored.logprobs, scored.top_logprobs, strict=True)]
        for entry, is_high in enumerate(rank_is_high):
            actual = found["actual_logprobs"][row][entry][0]
            assert actual == pytest.approx(scored.logprobs[entry], abs=1e-4)
            if is_high:
                ids, logprobs = found["logprob_token_ids"][row][entry], found["logprobs"][row][entry]
                expected_top = dict(zip(scored.top_ids[entry], scored.top_logprobs[entry].values(), strict=True))
                check_top(dict(zip(ids, logprobs, strict=True)), expected_top)
        assert all(math.isfinite(value) for entry in found["logprobs"][row] for value in entry)


def check_top(found: dict[int, float], expected: dict[int, float]) -> None:
    """Check the most likely tokens, of which those that are equally likely within rounding may change places."""
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    last = min(expected.values())
    for token_id in found.keys() | expected.keys():
        assert found.get(token_id, last) == pytest.approx(expected.get(token_id, last), abs=1e-4)


@pytest.fixture
def ask(stack: Stack) -> Iterator[Callable[..., httpx.Response]]:
    """Post to `/get_sequence_logprobs/`, as TRL's client did until 1.10."""
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        assert http.get("/health/").status_code == 200
        yield lambda **body: http.post("/get_sequence_logprobs/", json=body)


def arrays(reply: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return logprobs, token_ids, actual_logprobs, actual_token_ids."""
    num, longest, k = reply["shape"]
    names = [
        ("logprobs", "<f4", k),
        ("token_ids", "<i4", k),
        ("actual_logprobs", "<f4", 1),
        ("actual_token_ids", "<i4", 1),
    ]
    return tuple(
        np.frombuffer(base64.b64decode(reply[f"{name}_b64"]), dtype).reshape(num, longest, last)
        for name, dtype, last in names
    )


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sequence_logprobs_equal_those_of_a_score_job(ask: Ask, native: Client, k: int, temperature: float):
    reply = ask(sequences=SEQUENCES, prompt_lengths=PROMPT_LENGTHS, top_logprobs=k, temperature=temperature).json()
    binary = {"sequences": SEQUENCES, "prompt_lengths": PROMPT_LENGTHS, "response_format": "binary"}
    packed = ask(**binary, top_logprobs=k, temperature=temperature).json()

    assert set(reply) == {"logprobs", "logprob_token_ids"}
    logprobs, token_ids, actual_logprobs, actual_ids = arrays(packed)
    assert (packed["shape"], packed["completion_lengths"]) == ([3, 3, k], [3, 1, 3])
    for row, (sequence, length) in enumerate(zip(SEQUENCES, PROMPT_LENGTHS, strict=True)):
        items = [(sequence[:length], sequence[length:])]
        [scored] = native.score("demo", items, top_logprobs=k, temperature=temperature).sequences
        num = len(scored.token_ids)
        assert actual_ids[row, :num, 0].tolist() == scored.token_ids
        assert actual_logprobs[row, :num, 0] == pytest.approx(scored.logprobs.values(), abs=1e-5)
        assert np.isneginf(actual_logprobs[row, num:]).all()
        for entry in range(num):
            tops = dict(zip(scored.top_ids[entry], scored.top_logprobs[entry].values(), strict=True)) if k else {}
            assert token_ids[row, entry].tolist() == list(tops)
            assert logprobs[row, entry] == pytest.approx(list(tops.values()), abs=1e-5)
            found = dict(zip(reply["logprob_token_ids"][row][entry], reply["logprobs"][row][entry], strict=True))
            assert found == pytest.approx(tops | {scored.token_ids[entry]: scored.logprobs[entry]}, abs=1e-5)
            assert list(found)[:k] == list(tops)
        assert len(reply["logprobs"][row]) == num


def test_a_sequence_without_a_prompt_begins_with_a_token_that_has_no_logprob(ask: Ask):
    given = {"sequences": [[5, 6, 7], [5], [5, 6]], "prompt_lengths": [0, 0, 2], "top_logprobs": 2}
    reply, packed = ask(**given).json(), ask(**given, response_format="binary").json()

    assert [[bool(entry) for entry in row] for row in reply["logprobs"]] == [[False, True, True], [False], []]
    logprobs, _, actual_logprobs, actual_ids = arrays(packed)
    assert packed["completion_lengths"] == [3, 1, 0]
    assert np.isfinite(actual_logprobs[:, :, 0]).tolist() == [[False, True, True], [False] * 3, [False] * 3]
    assert actual_ids[:, :, 0].tolist() == [[0, 6, 7], [0, 0, 0], [0, 0, 0]]
    assert np.isfinite(logprobs).sum(axis=(1, 2)).tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"prompt_lengths": [1]}, 400, "prompt_lengths", "one for each"),
        ({"prompt_lengths": [1, 2, 7]}, 400, "prompt_lengths[2]", "at most 6"),
        ({"sequences": [[5], [5, 99_999], [5] * 4]}, 400, "sequences[1][1]", "below"),
        ({"sequences": [[5, 5], [5, 5], [5] * 5000]}, 400, "sequences[2]", "context"),
        ({"sequences": []}, 400, "sequences", "length"),
        ({"top_logprobs": 1025}, 400, "top_logprobs", "1024"),
        ({"top_logprobs": -1}, 400, "top_logprobs", "0"),
        ({"temperature": 0}, 400, "temperature", "1e-09"),
        ({"response_format": "numpy"}, 400, "response_format", "binary"),
        ({"seed": 1}, 400, "seed", "seed"),
        ({"model": "nobody"}, 404, "model", "nobody"),
    ],
)
def test_wrong_sequence_logprobs_requests_are_refused_by_name(
    ask: Ask, change: dict[str, Any], status: int, param: str, message: str
):
    reply = ask(**{"sequences": SEQUENCES, "prompt_lengths": PROMPT_LENGTHS} | change)

    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert re.search(message, error["message"])


def test_arrays_of_mostly_padding_are_refused(ask: Ask):
    uneven = {"sequences": [[5] * 1000, *[[5, 5]] * 200], "prompt_lengths": [1] * 201, "top_logprobs": 128}

    reply = ask(**uneven, response_format="binary")

    assert (reply.status_code, reply.json()["error"]["param"]) == (413, "sequences")
    assert "201 of up to 999 tokens" in reply.json()["error"]["message"]


def test_rollouts(trl: VLLMClient, stack: Stack):
    found = trl.generate(["import", "Return the"], n=2, temperature=0.7, max_tokens=5, generation_kwargs={"seed": 1})

    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == len(found["logprobs"]) == 4
    with Client(stack.url) as native:
        items = [(found["prompt_ids"][i // 2], ids) for i, ids in enumerate(found["completion_ids"])]
        for scored, logprobs in zip(native.score("demo", items).sequences, found["logprobs"], strict=True):
            assert [value for (value,) in logprobs] == pytest.approx(scored.logprobs.values(), abs=1e-4)
    assert [ids for (ids,) in found["logprob_token_ids"][0:1][0]] == found["completion_ids"][0]


def test_chats(trl: VLLMClient, stack: Stack):
    messages = [[{"role": "user", "content": "What is a list?"}], [{"role": "user", "content": "import"}]]

    found = trl.chat(messages, n=2, max_tokens=4, logprobs=3)

    assert len(found["completion_ids"]) == 4
    with Client(stack.url) as native:
        items = [(found["prompt_ids"][i // 2], ids) for i, ids in enumerate(found["completion_ids"])]
        scored = native.score("demo", items).sequences
    for row, ids in enumerate(found["completion_ids"]):
        for entry, token_id in enumerate(ids):
            place = found["logprob_token_ids"][row][entry].index(token_id)
            assert found["logprobs"][row][entry][place] == pytest.approx(scored[row].logprobs[entry], abs=1e-4)
