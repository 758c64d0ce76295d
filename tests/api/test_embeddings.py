"""Embed jobs and `/v1/embeddings` over HTTP, and on the demo model with the released SDKs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel, AutoTokenizer

from scorepool import Client, JobFailed, ScorepoolError, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker

TEXTS = ["import os", "What does os.listdir do?", "a"]


@pytest.fixture(scope="module")
def demo(root: Path) -> Path:
    return root / "scorepool" / "models" / "demo"


@pytest.fixture(scope="module")
def stack(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    with Stack([f"demo={demo}"], state=state, environ={"SCOREPOOL_PORT": str(free_port())}, logs=state) as stack:
        yield stack


@pytest.fixture
def sdk(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def native(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


def expected(folder: Path, text: str, pooling: str, dimensions: int | None = None) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
    pooled = (hidden[-1] if pooling == "last" else hidden.mean(dim=0))[:dimensions]
    values: list[float] = (pooled / pooled.norm()).tolist()
    return values


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_the_sdk_gets_the_embeddings_of_transformers(sdk: OpenAI, demo: Path, encoding_format: Any):
    options = {} if encoding_format is None else {"encoding_format": encoding_format}
    found = sdk.embeddings.create(model="demo", input=TEXTS, **options)

    assert [one.index for one in found.data] == [0, 1, 2]
    assert found.model_extra == {"pooling": "last"}
    assert found.usage.prompt_tokens == found.usage.total_tokens > 3
    if encoding_format == "base64":
        assert isinstance(found.data[0].embedding, str)
        return
    for text, one in zip(TEXTS, found.data, strict=True):
        assert one.embedding == pytest.approx(expected(demo, text, "last"), abs=1e-5)


def test_one_text_ids_and_fewer_dimensions(sdk: OpenAI, demo: Path):
    one = sdk.embeddings.create(model="demo", input=TEXTS[1], dimensions=8, extra_body={"pooling": "mean"})
    assert one.data[0].embedding == pytest.approx(expected(demo, TEXTS[1], "mean", 8), abs=1e-5)
    ids = AutoTokenizer.from_pretrained(demo)(TEXTS[1])["input_ids"]
    for given in (ids, [ids]):
        again = sdk.embeddings.create(model="demo", input=given, dimensions=8, extra_body={"pooling": "mean"})
        assert again.data[0].embedding == pytest.approx(one.data[0].embedding, abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions: expected at most") as refused:
        sdk.embeddings.create(model="demo", input="a", dimensions=65_000)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.embeddings.create(model="demo", input=["a", "long " * 20_000])
    assert (too_long.value.param, too_long.value.code) == ("input", "context_length_exceeded")


def test_the_native_client_embeds_any_number_of_items(native: Client, demo: Path):
    result = native.embed("demo", [TEXTS[0]] * 300, pooling="mean", normalize=False)
    assert len(result.embeddings) == 300
    assert result.stamp.pooling == "mean"
    assert "300 embedded" in repr(result)
    length = sum(value * value for value in result.embeddings[0].values) ** 0.5
    assert length != pytest.approx(1.0, abs=1e-3)
    wanted = expected(demo, TEXTS[0], "mean")
    assert [value / length for value in result.embeddings[299].values] == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(TypeError, match=r"items\[1\]"):
        native.embed("demo", ["a", []])
    with pytest.raises((JobFailed, ScorepoolError), match="dimensions"):
        native.embed("demo", ["a"], dimensions=60_000)


def test_a_batch_of_embeddings(sdk: OpenAI):
    body = {"model": "demo", "input": TEXTS[0]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    file = sdk.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = sdk.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    [answer] = map(json.loads, sdk.files.content(batch.output_file_id).text.splitlines())
    one = sdk.embeddings.create(**body, encoding_format="float")
    assert answer["response"]["body"]["data"][0]["embedding"] == pytest.approx(one.data[0].embedding, abs=1e-6)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], [1000]]}, "input[1][0]"),
        ({"input": [1, 1000]}, "input[1]"),
        ({"input": [1] * 65}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(
    serving: Serving, worker: FakeWorker, changes: dict[str, Any], field: str
):
    worker.register(pooling="last")
    async with serving() as http:
        reply = await http.post("/v1/embeddings", json={"model": "demo", "input": "a"} | changes)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


@pytest.mark.anyio
async def test_a_model_without_embeddings_says_so(serving: Serving, worker: FakeWorker):
    job = {"type": "embed", "model": "demo", "items": [{"prompt": "a"}]}

    async def refused(http: httpx.AsyncClient, path: str, body: Any) -> None:
        reply = await http.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith("model: 'demo' makes no embeddings")

    async with serving() as http:
        await refused(http, "/v1/jobs", job)
        await refused(http, "/v1/embeddings", {"model": "demo", "input": "a"})
    worker.register(classifier=wire.Classifier(labels=["a"], activation="sigmoid"))
    async with serving() as http:
        await refused(http, "/v1/jobs", job)
    worker.register(pooling="mean")
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=job)).status_code == 202
