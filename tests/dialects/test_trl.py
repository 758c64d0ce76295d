"""TRL's client of a vLLM server, as it is shipped."""

import math
import warnings
from typing import Any

import pytest

from client import Client
from client.stack import Stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports, which are not ours to mend
    from trl.generation import vllm_client
    from trl.generation.vllm_client import VLLMClient

pytestmark = pytest.mark.filterwarnings("ignore")

SEQUENCES = [[1209, 274, 312, 885], [5, 6, 7], [305, 16, 274, 274, 1209, 312]]
PROMPT_LENGTHS = [1, 2, 3]


@pytest.fixture
def trl(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> VLLMClient:
    # It asks for vLLM to be installed, of which it uses nothing here.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    return VLLMClient(base_url=stack.url)


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 1}, {"top_logprobs": 5, "chunk_size": 1}])
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
                assert found["logprob_token_ids"][row][entry] == scored.top_ids[entry]
                assert found["logprobs"][row][entry] == pytest.approx(scored.top_logprobs[entry].values(), abs=1e-4)
        assert all(math.isfinite(value) for entry in found["logprobs"][row] for value in entry)


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
