"""Teachers as slime and ms-swift ask them: the bodies of their clients, and what these read of the answers."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a file?"}]
RESPONSE = [274, 312, 9, 45, 701, 33]
# What dataclasses.asdict makes of ms-swift's RolloutInferRequest and RequestConfig.
REQUEST: dict[str, Any] = {"images": [], "audios": [], "videos": [], "tools": None, "objects": {}}
REQUEST |= {"chat_template_kwargs": {}, "data_dict": {}, "uuid": None}
CONFIG: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
CONFIG |= {"repetition_penalty": None, "num_beams": 1, "stop": [], "seed": None, "stream": False, "logprobs": False}
CONFIG |= {"top_logprobs": None, "n": 1, "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0}
CONFIG |= {"length_penalty": 1.0, "return_details": False, "structured_outputs_regex": None}


@pytest.fixture(scope="module")
def demo(root: Path) -> Path:
    return root / "scorepool" / "models" / "demo"


@pytest.fixture(scope="module")
def chat_ids(demo: Path) -> list[int]:
    ids = AutoTokenizer.from_pretrained(demo).apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids
    return list(ids)


@pytest.fixture(scope="module")
def teacher(demo: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()


def logprobs_of(teacher: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return torch's logprobs of the whole vocabulary, for each token but the first."""
    with torch.no_grad():
        return torch.log_softmax(teacher(torch.tensor([ids])).logits[0].float() / temperature, dim=-1)[:-1]


def infer(http: httpx.Client, *contents: Any, **config: Any) -> httpx.Response:
    requests = [REQUEST | {"messages": [*CHAT, {"role": "assistant", "content": content}]} for content in contents]
    body = {"infer_requests": requests, "request_config": CONFIG | config, "metrics": None, "use_tqdm": None}
    return http.post("/infer/", json=body | {"adapter_request": None})


def test_slime_reads_the_logprobs_of_a_response(http: httpx.Client, teacher: Any, chat_ids: list[int]):
    ids = chat_ids + RESPONSE
    sampling = {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = http.post("/generate", json=body).json()

    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    expected = logprobs_of(teacher, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    assert answer["meta_info"]["logprobs_mode"] == "raw_logprobs"


@pytest.mark.parametrize(
    "content", [RESPONSE, {"token_ids": RESPONSE, "loss_scale": [1] * len(RESPONSE)}, {"input_ids": RESPONSE}]
)
def test_swift_reads_the_logprobs_of_the_sampled_tokens(
    http: httpx.Client, teacher: Any, chat_ids: list[int], content: Any
):
    assert http.get("/health/").status_code == 200
    answer = infer(http, content, RESPONSE[:3], prompt_logprobs=0).json()

    for reply, response in zip(answer, (RESPONSE, RESPONSE[:3]), strict=True):
        ids = chat_ids + response
        assert set(reply) == {"id", "object", "created", "model", "choices", "usage", "prompt_logprobs"}
        assert set(reply["choices"][0]) == {"index", "message", "finish_reason"}
        assert reply["usage"]["prompt_tokens"] == len(ids)
        first, *entries = reply["prompt_logprobs"]
        assert first is None
        found = [next(iter(entry.items())) for entry in entries]
        assert [int(token_id) for token_id, _ in found] == ids[1:]
        expected = logprobs_of(teacher, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert [info["logprob"] for _, info in found] == pytest.approx(expected.tolist(), abs=1e-4)


def test_swift_reads_the_most_likely_tokens(http: httpx.Client, teacher: Any, chat_ids: list[int]):
    [reply] = infer(http, RESPONSE, prompt_logprobs=64, return_details=True).json()

    ids = chat_ids + RESPONSE
    expected = logprobs_of(teacher, ids).topk(64)
    assert reply["prompt_token_ids"] == ids
    assert len(reply["choices"][0]["token_ids"]) == 1
    for entry, values in zip(reply["prompt_logprobs"][1:], expected.values, strict=True):
        found = sorted(entry.values(), key=lambda info: -info["logprob"])[:64]
        assert [info["logprob"] for info in found] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_chat_without_a_response_is_continued(http: httpx.Client):
    body = {"infer_requests": [{"messages": CHAT}], "request_config": {"max_tokens": 5, "temperature": 0}}
    [reply] = http.post("/infer/", json=body).json()
    chat = {"model": "demo", "messages": CHAT, "max_tokens": 5, "temperature": 0}
    expected = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert reply["choices"][0]["message"]["content"] == expected["message"]["content"]


@pytest.mark.parametrize(
    ("content", "config", "field", "reason"),
    [
        ("text", {}, "infer_requests[0]", "the last message is token ids"),
        ([5, {"type": "text", "text": "a"}], {}, "infer_requests[0].messages[2]", "a list of text parts, or a list of"),
        ([5, 10**6], {}, "infer_requests[0].messages", "1000000"),
        ({"loss_scale": [1]}, {}, "infer_requests[0].messages[2].content", "exactly one of `token_ids`"),
        ([5, -1], {}, "infer_requests[0].messages[2].content[1]", ">= 0"),
        (RESPONSE, {"n": 2}, "request_config", "`n` is not supported here, expected 1"),
        (RESPONSE, {"num_beams": 4}, "request_config", "`num_beams` is not supported here"),
        (RESPONSE, {"structured_outputs_regex": "a"}, "request_config", "`structured_outputs_regex`"),
        (RESPONSE, {"prompt_logprobs": 5000}, "request_config.prompt_logprobs", "1024"),
        ([5] * 3000, {}, "infer_requests[0].messages", "2048"),
    ],
)
def test_what_cannot_be_answered_is_named(http: httpx.Client, content: Any, config: Any, field: str, reason: str):
    answer = infer(http, content, **config)

    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert reason in error["message"]
    assert error["field"].startswith(field)
