"""Adapters by name through the whole stack: every dialect, the numbers of peft, and 404 for a name that is unknown."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import scorepool
from scorepool import Client, Result, ScorepoolError
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from scorepool.verify import on_server, verify
from scorepool.wire import Generate, Score, ScoreItem, Tokenize
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.mlx_adapters import oracle_with_mlx, save_mlx_adapter
from tests.engine.oracle import Oracle
from tests.tiny_models import TinyModels
from tests.tiny_tokenizer import BOS

PROMPT, COMPLETION = [BOS, 20, 30, 40], [50, 60, 70]


@pytest.fixture(scope="module")
def folders(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(tiny_models("llama"), tmp_path_factory.mktemp(name), seed)
        for seed, name in enumerate(("sql", "style"))
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], tiny_models: TinyModels) -> dict[str, list[float]]:
    """Return the logprobs of the completion by name, as peft computes them."""
    base = tiny_models("llama")
    oracles = {"llama": Oracle(base)} | {name: oracle_with(base, folder) for name, folder in folders.items()}
    token_ids = PROMPT + COMPLETION
    rows = {name: oracle.logprobs(token_ids) for name, oracle in oracles.items()}
    return {
        name: [float(row[place - 1, token_ids[place]]) for place in range(len(PROMPT), len(token_ids))]
        for name, row in rows.items()
    }


@pytest.fixture(scope="module")
def stack(
    folders: dict[str, Path], tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_REDIS_APPENDFSYNC": "everysec",
        "SCOREPOOL_RESULT_CACHE_BYTES": None,  # the default
        "SCOREPOOL_ADAPTERS": ";".join(f"{name}={folder}" for name, folder in folders.items()),
    }
    model = f"llama,other={tiny_models('llama')}"
    with Stack([model], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


def test_native_jobs_name_an_adapter_as_model_or_beside_it(client: Client, expected: dict[str, list[float]]):
    items = [(PROMPT, COMPLETION)]
    asked = [
        ("llama", "llama", {}),
        ("sql", "sql", {}),
        ("sql", "llama", {"adapter": "sql"}),
        ("style", "other", {"adapter": "style"}),
        ("style", "style", {"adapter": "style"}),
        ("sql", "sql", {}),  # from the cache
        ("llama", "llama", {}),
    ]

    for name, model, options in asked:
        result = client.score(model, items, **options)

        assert result.sequences[0].logprobs == pytest.approx(expected[name], abs=1e-4)
        assert result.stamp.model == "llama"
        assert (result.stamp.adapter or "llama").partition("@")[0] == name


def scored_from_cache(client: Client, name: str, items: list[tuple[list[int], list[int]]]) -> Result:
    """Score it until the result is one of the cache, which is written a little after a job's end."""
    deadline = time.monotonic() + 30
    while not (result := client.score(name, items)).stamp.cached:
        assert time.monotonic() < deadline
    return result


def test_the_cache_gives_no_result_of_another_adapter(client: Client):
    items = [([BOS, 9, 8], [7, 6])]

    first = {name: client.score(name, items) for name in ("llama", "sql", "style")}
    again = {name: scored_from_cache(client, name, items) for name in ("style", "llama", "sql")}

    for name in first:
        assert not first[name].stamp.cached
        assert again[name].sequences[0].logprobs == first[name].sequences[0].logprobs
        assert again[name].stamp.adapter == first[name].stamp.adapter


def test_models_are_listed_with_their_adapters(http: httpx.Client, folders: dict[str, Path]):
    listed = http.get("/v1/models").json()

    found = {each["id"]: (each["root"], each["parent"]) for each in listed["data"]}
    assert found == {
        "llama": ("llama", None),
        "other": ("llama", None),
        "sql": ("llama", "llama"),
        "style": ("llama", "llama"),
    }
    adapters = {each["name"]: each for each in listed["models"][0]["adapters"]}
    assert adapters["sql"]["path"] == str(folders["sql"])
    assert adapters["sql"]["rank"] == 8
    assert http.get("/v1/models/sql").json()["parent"] == "llama"


def test_every_result_names_the_adapter_whatever_was_computed(client: Client):
    label = client.score("sql", [(PROMPT, COMPLETION)]).stamp.adapter
    bad = (PROMPT, [10**6])

    assert client.score("sql", [(PROMPT, COMPLETION), bad], on_item_error="report").stamp.adapter == label
    assert client.score("sql", [bad], on_item_error="report").stamp.adapter == label
    assert client.submit(Tokenize(model="sql", prompt="a")).result().stamp.adapter == label


def test_files_are_computed_with_an_adapter(stack: Stack, tmp_path: Path):
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n' * 3)
    texts.write_text('{"text": "a b c"}\n' * 3)

    scored = scorepool.score_file(rows, tmp_path / "scored.jsonl", model="sql", url=stack.url)
    measured = scorepool.perplexity(texts, tmp_path / "measured.jsonl", model="sql", url=stack.url)

    assert (scored.num_failed, scored.stamp_differences) == (0, [])
    assert (measured.num_failed, measured.stamp_differences) == (0, [])


@pytest.mark.parametrize("name", ["llama", "sql", "style"])
def test_other_dialects_take_the_name_of_an_adapter(
    name: str, http: httpx.Client, stack: Stack, expected: dict[str, list[float]]
):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="-") as sdk:
        completion = sdk.completions.create(
            model=name, prompt=PROMPT + COMPLETION, max_tokens=1, echo=True, logprobs=1, temperature=0
        )
    assert completion.choices[0].logprobs.token_logprobs[4:7] == pytest.approx(expected[name], abs=1e-4)
    assert completion.model == name

    tokens = http.post(
        "/inference/v1/generate",
        json={
            "model": name,
            "token_ids": PROMPT + COMPLETION,
            "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
        },
    )
    assert tokens.status_code == 200, tokens.text
    prompt_logprobs = tokens.json()["prompt_logprobs"][4:]
    found = [each[str(token_id)]["logprob"] for each, token_id in zip(prompt_logprobs, COMPLETION, strict=True)]
    assert found == pytest.approx(expected[name], abs=1e-4)


def test_lines_of_a_batch_name_adapters(client: Client, expected: dict[str, list[float]]):
    body = {"prompt": PROMPT + COMPLETION, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    names = ["llama", "sql", "style", "sql"]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": {"model": name, **body}}
        for index, name in enumerate(names)
    ]
    file = client.upload_file("\n".join(map(json.dumps, lines)).encode())
    batch = client.wait_for_batch(client.create_batch(file.id, endpoint="/v1/completions").id)

    results = {}
    for line in client.file_lines(batch.output_file_id):
        decoded = json.loads(line)
        results[int(decoded["custom_id"])] = decoded["response"]["body"]
    for index, name in enumerate(names):
        logprobs = results[index]["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[4:7] == pytest.approx(expected[name], abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/jobs", {"type": "score", "model": "gone", "items": [{"prompt": "a", "completion": "b"}]}, "model"),
        (
            "/v1/jobs",
            {"type": "score", "model": "llama", "adapter": "gone", "items": [{"prompt": "a", "completion": "b"}]},
            "adapter",
        ),
        ("/v1/completions", {"model": "gone", "prompt": "a"}, "model"),
        ("/v1/chat/completions", {"model": "gone", "messages": [{"role": "user", "content": "a"}]}, "model"),
    ],
)
def test_an_unknown_adapter_is_404(http: httpx.Client, path: str, body: dict[str, object], field: str):
    reply = http.post(path, json=body)

    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["param"] == field
    assert "'gone'" in error["message"]
    assert "sql, style" in error["message"]


@pytest.mark.parametrize("model", ["sql", "llama"])
def test_a_result_of_an_adapter_is_verified_by_the_adapter(client: Client, model: str):
    score = Score(model=model, items=[ScoreItem(prompt=PROMPT, completion=COMPLETION)])
    generate = Generate(model=model, prompt=PROMPT, max_tokens=4, temperature=0.8, seed=1, logprobs=True)
    verdicts = []
    for request in (score, generate):
        job = client.submit(request)
        job.result(timeout_s=60)
        verdicts.append(verify(client.job(job.id), on_server(client, 60), request))

    assert {verdict.kind for verdict in verdicts} <= {"equal", "within"}


def test_two_different_adapters_in_one_request_are_refused(client: Client):
    with pytest.raises(ScorepoolError) as refused:
        client.score("sql", [(PROMPT, COMPLETION)], adapter="style")

    assert refused.value.status == 400
    assert "`model` names the adapter 'sql', expected no other one, found 'style'" in refused.value.message


@pytest.mark.soak
def test_an_adapter_is_loaded_replaced_and_unloaded_while_the_server_runs(
    stack: Stack, client: Client, http: httpx.Client, folders: dict[str, Path], expected: dict[str, list[float]]
):
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": str(folders["sql"])})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert client.score("late", [(PROMPT, COMPLETION)]).sequences[0].logprobs == pytest.approx(
        expected["sql"], abs=1e-4
    )

    again = http.post("/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": str(folders["style"])})
    assert again.status_code == 400
    assert "'late' is loaded already, expected a new name, or `load_inplace`" in again.json()["error"]["message"]

    client.load_adapter("late", str(folders["style"]), replaces=True)
    assert client.score("late", [(PROMPT, COMPLETION)]).sequences[0].logprobs == pytest.approx(
        expected["style"], abs=1e-4
    )

    worker = next(process for name, process in stack._processes.items() if name.startswith("worker"))
    worker.kill()
    worker.wait(30)
    stack.restart_dead()
    result = client.score("late", [([*PROMPT, 9], COMPLETION)])
    assert result.stamp.adapter.startswith("late@")

    client.unload_adapter("late")
    with pytest.raises(ScorepoolError) as gone:
        client.score("late", [(PROMPT, COMPLETION)])
    assert gone.value.status == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404


def test_an_adapter_that_mlx_lm_trained_is_loaded_while_the_server_runs(
    client: Client, http: httpx.Client, tiny_models: TinyModels, tmp_path: Path, expected: dict[str, list[float]]
):
    base, token_ids = tiny_models("llama"), PROMPT + COMPLETION
    folder = save_mlx_adapter(base, tmp_path / "dora", 5, "dora")
    row = oracle_with_mlx(base, folder).logprobs(token_ids)
    numbers = [float(row[place - 1, token_ids[place]]) for place in range(len(PROMPT), len(token_ids))]

    client.load_adapter("taught", str(folder))
    items = [ScoreItem(prompt=PROMPT, completion=COMPLETION)]
    jobs = {name: client.submit(Score(model=name, items=items, cache=False)) for name in ("taught", "sql", "llama")}

    for name, job in jobs.items():
        found = job.result(timeout_s=60).sequences[0].logprobs
        assert found == pytest.approx((expected | {"taught": numbers})[name], abs=1e-4)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"fine_tune_type": "full"}))
    body = {"lora_name": "taught", "lora_path": str(folder), "load_inplace": True}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 400
    assert 'fine_tune_type is \'full\', expected "lora" or "dora"' in reply.json()["error"]["message"]
    assert client.score("taught", [(PROMPT, COMPLETION)]).sequences[0].logprobs == pytest.approx(numbers, abs=1e-4)
    client.unload_adapter("taught")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "bad", "lora_path": "/nowhere"}, "cannot load it: adapter 'bad' cannot be loaded: there is no"),
        ({"lora_name": "bad", "lora_path": "here"}, "`lora_path` must be the absolute path"),
        ({"lora_name": "other", "lora_path": "/nowhere"}, "'other' is the name of another model or adapter"),
        ({"lora_name": "llama", "lora_path": "/nowhere"}, "'llama' is the name of another model or adapter"),
        ({"lora_name": "sql", "lora_path": "/nowhere", "load_inplace": True}, "there is no folder '/nowhere'"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_changes_nothing(
    body: dict[str, object], message: str, http: httpx.Client, client: Client, expected: dict[str, list[float]]
):
    reply = http.post("/v1/load_lora_adapter", json=body)

    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    names = {each["id"] for each in http.get("/v1/models").json()["data"]}
    assert names == {"llama", "other", "sql", "style"}
    result = client.score("sql", [(PROMPT, COMPLETION)])
    assert result.sequences[0].logprobs == pytest.approx(expected["sql"], abs=1e-4)
