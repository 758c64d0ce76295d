"""Work is not done twice through the running stack: an evaluation that runs again computes nothing and is equal."""

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import Client, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from scorepool.store import Keys, RqKeys
from scorepool.verify import on_server, verify
from tests.scorepool.integrations.test_lm_eval import TaskManager, simple_evaluate
from tests.worker.conftest import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
ITEMS = [wire.ScoreItem(prompt=[3, 4, 5], completion=[number, 7, 8]) for number in range(10, 14)]


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    models = [*(f"{name}={folder}" for name, folder in folders.items()), f"again={folders['llama']}"]
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_DTYPE": "float32",
        "SCOREPOOL_REDIS_APPENDFSYNC": "everysec",
        "SCOREPOOL_RESULT_CACHE_BYTES": None,  # the default
        "SCOREPOOL_LEASE_S": "2",
    }
    with Stack(models, state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


def metrics(stack: Stack) -> dict[str, float]:
    with urllib.request.urlopen(f"{stack.url}/metrics") as reply:
        lines = re.findall(r"^(\S+) (\S+)$", reply.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def computed(stack: Stack) -> int:
    """Return how many given tokens the workers have computed. Each counts what is new with its heartbeat."""
    with Redis.from_url(stack.redis_url) as redis:
        for _ in range(2):  # the next heartbeat may have looked at the engine before this call
            await_heartbeats(redis)
        return int(redis.hget(Keys.prefix_tokens, "computed") or 0)


def await_heartbeats(redis: Redis) -> None:
    """Wait until each worker has sent a heartbeat."""

    def heartbeats() -> dict[bytes, bytes | None]:
        return {worker: redis.hget(worker, "last_heartbeat") for worker in redis.smembers(RqKeys.workers)}

    before = heartbeats()
    until(lambda: all(now != before.get(worker) for worker, now in heartbeats().items()))


@pytest.mark.soak
def test_an_evaluation_that_runs_again_computes_nothing_and_is_equal(stack: Stack, tmp_path: Path):
    data = tmp_path / "questions.jsonl"
    lines = [
        {"question": f"The value of item {index} is", "choices": [" one", " two of them"], "answer": index % 2}
        for index in range(8)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "task.yaml").write_text(
        f"task: choices\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )

    def evaluate() -> dict[str, Any]:
        found = simple_evaluate(
            "scorepool",
            model_args=f"model=llama,base_url={stack.url}",
            tasks=["choices"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            batch_size=1,
            bootstrap_iters=0,
            log_samples=True,
        )
        samples = [(each["doc"], each["resps"]) for each in found["samples"]["choices"]]
        return {"results": found["results"], "samples": samples}

    first = evaluate()
    before = computed(stack)
    assert before > 0
    again = evaluate()
    assert again == first
    assert computed(stack) == before
    found = metrics(stack)
    assert found['scorepool_result_cache_lookups_total{outcome="hit"}'] >= 16
    assert found["scorepool_result_cache_entries"] >= 16
    assert found["scorepool_result_cache_bytes"] > 16 * 200


def test_a_result_says_what_was_not_computed(client: Client):
    first = client.submit(wire.Score(model="llama", items=ITEMS[:2], top_logprobs=2)).result()
    assert (first.stamp.cached, first.stamp.cached_items) == (False, 0)
    both = client.submit(wire.Score(model="llama", items=ITEMS, top_logprobs=2)).result()
    assert (both.stamp.cached, both.stamp.cached_items) == (False, 2)
    again = client.submit(wire.Score(model="llama", items=ITEMS[:2], top_logprobs=2)).result()
    assert (again.stamp.cached, again.stamp.cached_items) == (True, 2)
    assert again.sequences == first.sequences == both.sequences[:2]
    new = client.submit(wire.Score(model="llama", items=ITEMS[:2], top_logprobs=2, cache=False)).result()
    assert not new.stamp.cached
    assert (
        not client.submit(wire.Score(model="llama", items=ITEMS[:2], top_logprobs=2, cache_salt="run 2"))
        .result()
        .stamp.cached_items
    )


def test_a_greedy_chat_is_given_again(client: Client):
    request = wire.Generate(model="demo", messages=[wire.Message(role="user", content="hi")], temperature=0)
    first, again = (client.submit(request).result() for _ in range(2))
    assert again.stamp.cached
    assert again.sequences == first.sequences
    assert replace(again.usage, cached_tokens=0) == replace(first.usage, cached_tokens=0)
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    four = client.submit(wire.Generate(model="demo", prompt="four of", temperature=0, n=4, max_tokens=5)).result()
    assert four.stamp.cached_items == 3
    assert len({tuple(sequence.token_ids) for sequence in four.sequences}) == 1


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"recompute": True}, {"stream": True}, {"cache": False}])
def test_what_must_be_computed_is_computed(client: Client, options: dict[str, Any]):
    request = wire.Generate(model="demo", prompt="a b c", max_tokens=4, **{"temperature": 0.0} | options)
    assert not any(client.submit(request).result().stamp.cached_items for _ in range(2))


def test_two_models_never_mix_and_two_workers_of_equal_weights_share(client: Client):
    results = {
        model: client.submit(wire.Score(model=model, items=[wire.ScoreItem(prompt=[3], completion=[4, 5, 6])])).result()
        for model in ("llama", "demo", "again")
    }
    assert [results[model].stamp.cached for model in ("llama", "demo", "again")] == [False, False, True]
    assert results["again"].sequences == results["llama"].sequences
    assert results["again"].stamp.model == "again"
    assert results["demo"].sequences[0].logprobs != results["llama"].sequences[0].logprobs


def test_200_identical_jobs_at_once_are_one_forward(stack: Stack, client: Client):
    before = computed(stack)
    prompt = random.choices(range(20, 60), k=20)  # new to the stack's caches, also when the test is run again
    request = wire.Score(model="llama", items=[wire.ScoreItem(prompt=prompt, completion=[9] * 21)])
    with ThreadPoolExecutor(8) as pool:
        ids = [job_id for part in pool.map(lambda _: client.submit_many([request] * 25), range(8)) for job_id in part]
    results = [client.result(job_id) for job_id in ids]
    assert sum(not result.stamp.cached for result in results) == 1
    assert len({wire.encode(result.sequences) for result in results}) == 1
    assert computed(stack) == before + 40


def test_verify_computes(stack: Stack, client: Client):
    request = wire.Score(model="llama", items=[wire.ScoreItem(prompt=[3, 4], completion=[6, 6])])
    job = client.submit(request)
    job.result()
    seen: list[wire.Result] = []
    recompute = on_server(client, 60)

    def watched(request: wire.Score) -> wire.Result:
        seen.append(recompute(request))
        return seen[-1]

    assert verify(client.job(job.id), watched, request).kind in {"equal", "within"}
    assert [result.stamp.cached_items for result in seen] == [0]
