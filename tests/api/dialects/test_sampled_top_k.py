"""Dialects take a `top_k` of any size: one above the largest of a job keeps every token, as -1 does."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from scorepool import wire
from scorepool.api.dialects.sglang import generate as sglang
from scorepool.api.dialects.sglang.endpoints import GENERATE
from scorepool.api.dialects.swift import infer
from scorepool.api.dialects.tgi import generate as tgi
from scorepool.api.dialects.tinker import sample


def of_sglang(top_k: int) -> wire.Generate:
    body = {"text": "a", "sampling_params": {"top_k": top_k}, "image_data": [], "video_data": [], "audio_data": []}
    read = GENERATE.parse(json.dumps(body | {"modalities": []}).encode())
    [request] = sglang.to_requests(read, "demo", 60)
    return request


def of_swift(top_k: int) -> wire.Generate:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    body = parsed({"infer_requests": [chat], "request_config": {"top_k": top_k}}, infer.InferBody)
    return infer.to_request(body, [5], "demo", 60)


def of_tgi(top_k: int) -> wire.Generate:
    body = parsed({"inputs": "a", "parameters": {"top_k": top_k}}, tgi.TextGenerationRequest)
    return tgi.to_request(body, "demo", 60, stream=False)


def of_tinker(top_k: int) -> wire.Generate:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    body = parsed({"prompt": prompt, "sampling_params": {"top_k": top_k}}, sample.SampleRequest)
    return sample.to_request(body, "demo")


def parsed(body: dict[str, Any], body_type: Any) -> Any:
    return wire.parse(json.dumps(body).encode(), body_type)


@pytest.mark.parametrize("request_of", [of_sglang, of_swift, of_tgi, of_tinker])
def test_a_large_number_keeps_every_token(request_of: Callable[[int], wire.Generate]):
    assert request_of(1_000_000).top_k == 1_000_000
    assert request_of(100_000_000).top_k == request_of(2**31 - 1).top_k == 0
    with pytest.raises(wire.Invalid, match="top_k"):
        request_of(2**31)
