"""What trainers ask of a vLLM server itself, against the running stack."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_LOGPROBS_MODE": "processed_logprobs"}
    with Stack(
        [f"demo={root / 'scorepool' / 'models' / 'demo'}"], state=state, environ=environ, logs=state / "logs"
    ) as stack:
        yield stack


def cached_tokens(server: Stack, seed: int) -> int:
    """Generate from a prompt; return how many of its tokens were not computed."""
    body = {"model": "demo", "prompt": list(range(100, 300)), "max_tokens": 1, "seed": seed}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
    cached: int = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return cached


def test_the_configuration_is_where_trl_and_skyrl_read_it(server: Stack):
    info = httpx.get(f"{server.url}/server_info", params={"config_format": "json"}).json()
    config = info["vllm_config"]
    assert config["weight_transfer_config"] is None
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["model"] == "demo"
    assert httpx.get(f"{server.url}/get_world_size").json() == {"world_size": 1}
    for wrong in ({"config_format": "text"}, {"other": "1"}):
        assert httpx.get(f"{server.url}/server_info", params=wrong).status_code == 400


def test_cached_prompts_are_dropped(server: Stack):
    assert [cached_tokens(server, seed) for seed in range(3)] == [0, 0, 200]

    for body in (None, {}, {"reset_running_requests": False}):
        assert httpx.post(f"{server.url}/reset_prefix_cache", json=body).json() == {"success": True}
    assert [cached_tokens(server, seed) for seed in range(3)] == [0, 200, 200]

    for wrong in ({"reset_running_requests": True}, {"x": 1}, [], {"reset_running_requests": "maybe"}):
        assert httpx.post(f"{server.url}/reset_prefix_cache", json=wrong).status_code == 400
    params = {"reset_running_requests": "true"}
    assert httpx.post(f"{server.url}/reset_prefix_cache", params=params).status_code == 400


def test_a_rendered_chat_is_a_body_of_generate_with_the_tokens_of_the_chat(server: Stack):
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Say it twice."}],
        "max_tokens": 12,
        "temperature": 0.7,
        "seed": 3,
        "logprobs": True,
    }
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat, timeout=60)
    assert rendered.status_code == 200, rendered.text
    body = rendered.json()
    generated = httpx.post(f"{server.url}/inference/v1/generate", json=body | {"return_token_ids": True}, timeout=60)
    answered = httpx.post(f"{server.url}/v1/chat/completions", json=chat | {"return_token_ids": True}, timeout=60)
    assert generated.status_code == answered.status_code == 200, generated.text
    assert answered.json()["prompt_token_ids"] == body["token_ids"]
    one, other = generated.json()["choices"][0], answered.json()["choices"][0]
    assert one["token_ids"] == other["token_ids"]
    assert [entry["logprob"] for entry in one["logprobs"]["content"]] == pytest.approx(
        [entry["logprob"] for entry in other["logprobs"]["content"]], abs=1e-4
    )
    assert httpx.post(f"{server.url}/v1/chat/completions/render", json={"model": "demo"}).status_code == 400


@pytest.mark.parametrize(
    "options", [{"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": -1}, {"specprefill": True}]
)
def test_what_a_rendered_chat_cannot_carry_is_refused(server: Stack, options: dict[str, Any]):
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Go on."}]} | options
    reply = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat, timeout=60)
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, *options), reply.text
