"""Both clients have the same methods, and these reach every route of the API."""

import asyncio
import inspect
import re
from contextlib import suppress
from typing import Any

import httpx
import pytest

from scorepool import AsyncClient, Client, ScorepoolError, wire
from scorepool.api.app import create_app
from scorepool.sdk.async_jobs import AsyncJobHandle
from scorepool.sdk.client import JobHandle
from scorepool.store import Settings
from tests.scorepool.sdk.test_client import ID, SCORE

# Routes that no method of the SDK calls, and why.
LEFT_OUT = {
    "GET /healthz": "for supervisors: any reply says that the process runs",
    "GET /readyz": "for load balancers: wait_until_ready() asks /health, which also needs a model",
    "POST /v1/completions": "OpenAI's: for OpenAI's SDK",
    "POST /v1/chat/completions": "OpenAI's: for OpenAI's SDK",
    "POST /v1/responses": "OpenAI's: for OpenAI's SDK",
    "POST /v1/responses/input_tokens": "OpenAI's: for OpenAI's SDK",
    "GET /v1/responses/{id}": "OpenAI's: for OpenAI's SDK",
    "DELETE /v1/responses/{id}": "OpenAI's: for OpenAI's SDK",
    "POST /v1/responses/{id}/cancel": "OpenAI's: for OpenAI's SDK",
    "GET /v1/responses/{id}/input_items": "OpenAI's: for OpenAI's SDK",
    "POST /v1/embeddings": "OpenAI's: embed() submits a job",
    "POST /tokenize": "vLLM's: tokenize() submits a job",
    "POST /detokenize": "vLLM's: detokenize() submits a job",
    "POST /inference/v1/generate": "vLLM's: for trainers' clients",
    "POST /get_sequence_logprobs/": "TRL's",
    "POST /generate": "SGLang's",
    "POST /v1/score": "SGLang's and vLLM's",
    "POST /classify": "vLLM's: classify() submits a job",
    "POST /score": "vLLM's",
    "POST /rerank": "vLLM's",
    "POST /get_reward": "OpenRLHF's",
    "POST /update_weights_from_disk": "SGLang's: push_weights()",
    "POST /update_weight_version": "vLLM's and SGLang's: the label of push_weights()",
    "GET /weight_info": "vLLM's: weights()",
    "GET /get_weight_version": "SGLang's: weights()",
    "POST /v1/chat/completions/render": "vLLM's: tokenize() submits a job",
    "GET /server_info": "vLLM's: for trainers' clients",
    "GET /get_world_size": "vLLM's: models()",
    "POST /pause": "vLLM's: for trainers' clients",
    "POST /resume": "vLLM's: for trainers' clients",
    "GET /is_paused": "vLLM's: for trainers' clients",
    "POST /reset_prefix_cache": "vLLM's: for trainers' clients",
    "POST /infer/": "ms-swift's",
    "POST /": "text-generation-inference's: for its clients",
    "POST /generate_stream": "text-generation-inference's: for its clients",
    "GET /info": "text-generation-inference's: models()",
    "POST /v1/messages": "Anthropic's: for Anthropic's SDK",
    "POST /v1/messages/count_tokens": "Anthropic's: for Anthropic's SDK",
    "POST /v1/messages/batches": "Anthropic's: for Anthropic's SDK",
    "GET /v1/messages/batches": "Anthropic's: for Anthropic's SDK",
    "GET /v1/messages/batches/{id}": "Anthropic's: for Anthropic's SDK",
    "DELETE /v1/messages/batches/{id}": "Anthropic's: for Anthropic's SDK",
    "POST /v1/messages/batches/{id}/cancel": "Anthropic's: for Anthropic's SDK",
    "GET /v1/messages/batches/{id}/results": "Anthropic's: for Anthropic's SDK",
}
# Query parameters that no method sends: those of Anthropic's SDK.
OF_OTHER_CLIENTS = {
    "GET /v1/models": {"beta", "before_id", "after_id", "limit"},
    "GET /v1/models/{id}": {"beta"},
}
# A value for each parameter of the methods, or of one method.
GIVEN: dict[str, Any] = {
    "request": SCORE,
    "requests": [SCORE],
    "idempotency_key": "k",
    "path": "/adapters/a",
    "job": ID,
    "jobs": [ID],
    "wait_s": 1.0,
    "timeout_s": 0.0,
    "max_in_flight": 1,
    "model": "demo",
    "base": "demo",
    "name": "org/demo",
    "items": [("a", "b")],
    "classify.items": ["a"],
    "embed.items": ["a"],
    "prompt": "a",
    "weights": b"",
    "version": 1,
    "label": "a",
    "on_running": "finish",
    "token_ids": [1],
    "status": "queued",
    "kind": "score",
    "created_from": 0.0,
    "created_before": 1.0,
    "cursor": "c",
    "limit": 2,
    "file": b"{}",
    "filename": "a.jsonl",
    "expires_after_s": 3600,
    "output_expires_after_s": 3600,
    "purpose": "batch",
    "order": "asc",
    "after": "a",
    "file_id": "f",
    "offset": 1,
    "input_file_id": "f",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"a": "b"},
    "batch_id": "b",
    "url": "https://example.com",
    "events": ["job.finished"],
    "description": "d",
    "endpoint_id": "e",
    "change": wire.EndpointChange(description="d"),
    "state": "failed",
    "delivery_id": "d",
    "since": 1.0,
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def as_blocking(signature: inspect.Signature) -> str:
    """Write a signature as the blocking client's would be."""
    text = str(signature)
    text = re.sub(r"(AsyncGenerator|AsyncIterator)", "Iterator", text)
    text = text.replace("async_jobs.AsyncJobHandle", "client.JobHandle").replace("AsyncJobs", "Client")
    return text.replace("async_client.AsyncClient", "client.Client")


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Client, AsyncClient), (JobHandle, AsyncJobHandle)])
def test_both_clients_and_their_jobs_have_the_same_methods(blocking: type, asynchronous: type):
    assert public(blocking) == public(asynchronous)
    for name in (*public(blocking), "__init__"):
        one, other = getattr(blocking, name), getattr(asynchronous, name)
        if callable(one):
            assert str(inspect.signature(one)) == as_blocking(inspect.signature(other)), name
            assert inspect.getdoc(one) == inspect.getdoc(other), name


async def record_calls() -> list[httpx.Request]:
    """Call every method of AsyncClient, with all parameters, and return what it sends."""
    sent: list[httpx.Request] = []

    async def refuse(request: httpx.Request) -> httpx.Response:
        await request.aread()
        sent.append(request)
        return httpx.Response(404)

    async with AsyncClient("http://host", retry_s=0.0) as client:
        client._connection.http._transport = httpx.MockTransport(refuse)
        for name in sorted(public(AsyncClient) - {"url", "close", "attach", "detach"}):
            method = getattr(client, name)
            parameters = inspect.signature(method).parameters.values()
            given = {each.name: GIVEN.get(f"{name}.{each.name}", GIVEN.get(each.name)) for each in parameters}
            arguments = {each.name: given[each.name] for each in parameters if each.kind is not each.VAR_KEYWORD}
            called = method(**arguments)
            num_sent = len(sent)
            with suppress(ScorepoolError):
                await (called if inspect.iscoroutine(called) else anext(called))
            assert len(sent) > num_sent, f"{name} sends nothing"
    return sent


def route_of(request: httpx.Request, paths: dict[str, Any]) -> str:
    """Return the path of the route that gets a request: the one with the fewest parameters."""
    patterns = {path: re.sub(r"\\{id\\}", ".+" if "models" in path else "[^/]+", re.escape(path)) for path in paths}
    found = [path for path, pattern in patterns.items() if re.fullmatch(pattern, request.url.path)]
    assert found, f"the API has no {request.url.path}"
    return min(found, key=lambda path: path.count("{"))


def test_every_route_has_a_method_with_all_its_query_parameters():
    paths = create_app(Settings()).openapi()["paths"]
    given: dict[str, set[str]] = {}
    for request in asyncio.run(record_calls()):
        route = f"{request.method} {route_of(request, paths)}"
        given[route] = given.get(route, set()) | request.url.params.keys()
    routes = {f"{method.upper()} {path}": each for path, methods in paths.items() for method, each in methods.items()}
    assert routes.keys() - given.keys() == LEFT_OUT.keys(), "add a method to both clients, or a reason to LEFT_OUT"
    for route, names in given.items():
        parameters = {each["name"] for each in routes[route].get("parameters", []) if each["in"] == "query"}
        assert names == parameters - OF_OTHER_CLIENTS.get(route, set()), route
