"""One worker process of three models: weights and adapters of one change, owners take turns, kill -9 in the middle."""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch

from scorepool import Client, JobHandle, ScorepoolError, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.mlx_adapters import oracle_with_mlx, save_mlx_adapter
from tests.engine.oracle import Oracle
from tests.engine.test_pushed_weights import changed_copy
from tests.tiny_classifiers import build, logits_of
from tests.tiny_models import TinyModels

pytestmark = pytest.mark.timeout(300)
NAMES = ("teacher", "student", "judge")
WORKER = f"worker {','.join(NAMES)}"
ALICE, BOB, OPERATOR = "alice's key", "bob's key", "the operator's key"
KEYS = ",".join(
    f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"
    for name, key in (("alice", ALICE), ("bob", BOB), ("op", OPERATOR))
)
WEIGHTS = "/v1/models/student/weights"
Jobs = dict[JobHandle, tuple[str, int]]  # what each is, and its seed


class Models:
    """The folders of the models, and what must be found for each kind of job."""

    def __init__(self, folders: dict[str, Path], judge: torch.nn.Module, folder: Path) -> None:
        self.folders = folders
        self.judge = judge
        self.students = [
            folders["student"],
            *(changed_copy(folders["student"], folder / f"v{i}", seed=i) for i in (1, 2)),
        ]
        self.teacher = Oracle(folders["teacher"])
        self.adapters = {
            "style": save_adapter(folders["student"], folder / "style", 0, r=2),
            "taught": save_mlx_adapter(folders["student"], folder / "taught", 1, "dora", rank=2),
        }
        self._oracles: dict[tuple[Path, str | None], Oracle] = {}

    def student(self, folder: Path, adapter: str | None) -> Oracle:
        """Return the oracle of the student with the weights of a folder, and an adapter."""
        if (folder, adapter) not in self._oracles:
            made = {None: Oracle, "style": self._style, "taught": self._taught}[adapter]
            self._oracles[folder, adapter] = made(folder)
        return self._oracles[folder, adapter]

    def _style(self, folder: Path) -> Oracle:
        return oracle_with(folder, self.adapters["style"])

    def _taught(self, folder: Path) -> Oracle:
        return oracle_with_mlx(folder, self.adapters["taught"])


@pytest.fixture(scope="module")
def models(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Models:
    judge = tmp_path_factory.mktemp("judge")
    folders = {"teacher": tiny_models("qwen3"), "student": tiny_models("llama"), "judge": judge}
    return Models(folders, build(judge, "qwen2", num_labels=3), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_API_KEYS": KEYS,
        "SCOREPOOL_OPERATOR_KEYS": "op",
        "SCOREPOOL_MEMORY_BYTES": "900000",  # for any of the models, and no two of them
        "SCOREPOOL_PREFIX_CACHE_BYTES": "0",
        "SCOREPOOL_MAX_RUNNING_ROWS": "8",
        "SCOREPOOL_MODEL_TURN_S": "1",
        "SCOREPOOL_LEASE_S": "3",
        "SCOREPOOL_RESULT_CACHE_BYTES": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    specs = [f"{name}={folder}" for name, folder in models.folders.items()]
    with Stack(specs, state=state, environ=environ, logs=state / "logs", one_worker=True) as stack:
        yield stack


@pytest.fixture
def alice(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, ALICE) as client:
        yield client


@pytest.fixture
def operator(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=120, headers={"Authorization": f"Bearer {OPERATOR}"}) as http:
        yield http


def row(seed: int) -> list[int]:
    return [(7 * seed + 11 * place) % 240 + 4 for place in range(12 + seed % 9)]


def request(kind: str, seed: int, adapter: str | None) -> wire.Request:
    ids = row(seed)
    items = [wire.ScoreItem(prompt=ids[:5], completion=ids[5:])]
    match kind:
        case "judge":
            return wire.Classify(model="judge", items=[wire.ClassifyItem(prompt=ids)])
        case "embed":
            return wire.Embed(model="teacher", items=[wire.EmbedItem(prompt=ids)], pooling="last")
        case "compare":
            return wire.Compare(model="student", base="teacher", items=items, top_logprobs=-1)
        case "write":
            return wire.Generate(
                model="student", prompt=ids, max_tokens=30, ignore_eos=True, seed=seed, logprobs=True, adapter=adapter
            )
        case _:
            return wire.Score(model=kind, items=items, adapter=adapter)


KINDS = ("teacher", "student", "judge", "embed", "compare", "write")


def submit_all(client: Client, seeds: range, adapter: str | None = None) -> Jobs:
    """Submit a job of each kind for each seed; those of the student alone with the adapter."""
    submitted: Jobs = {}
    for seed in seeds:
        for kind in KINDS:
            submitted[client.submit(request(kind, seed, adapter if kind in ("student", "write") else None))] = (
                kind,
                seed,
            )
    return submitted


def logprobs_of(oracle: Oracle, token_ids: list[int], first: int) -> list[float]:
    table = oracle.logprobs(token_ids)
    return [float(table[at - 1, token_ids[at]]) for at in range(first, len(token_ids))]


def check(found: wire.Result, kind: str, seed: int, models: Models, versions: dict[int, Path]) -> None:
    """Check a result against transformers, with the weights and the adapter of its stamp."""
    ids, stamp = row(seed), found.stamp
    adapter = stamp.adapter.partition("@")[0] if stamp.adapter else None
    if kind in ("teacher", "judge", "embed"):
        assert (stamp.weights_version, adapter) == (0, None)
    if kind == "judge":
        assert list(found.classifications[0].logits) == pytest.approx(logits_of(models.judge, ids), abs=1e-4)
    elif kind == "embed":
        with torch.no_grad():
            hidden = models.teacher._model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert list(found.embeddings[0].values) == pytest.approx((hidden / hidden.norm()).tolist(), abs=1e-5)
    else:
        oracle = models.teacher
        if kind != "teacher":
            oracle = models.student(versions[stamp.weights_version], adapter)
        [sequence] = found.unpacked().sequences
        token_ids = ids + list(sequence.token_ids) if kind == "write" else ids
        expected = logprobs_of(oracle, token_ids, len(ids) if kind == "write" else 5)
        assert list(sequence.logprobs or ()) == pytest.approx(expected, abs=1e-4)
    if kind == "compare":
        assert found.comparison is not None
        assert (found.comparison.base.model, found.comparison.base.weights_version) == ("teacher", 0)
        base = found.comparison.sequences[0].base_logprobs
        assert list(base) == pytest.approx(logprobs_of(models.teacher, ids, 5), abs=1e-4)


def push(operator: httpx.Client, folder: Path) -> dict[str, Any]:
    answer = operator.post(WEIGHTS, json={"path": str(folder)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def send(operator: httpx.Client, folder: Path) -> dict[str, Any]:
    """Push weights as the content of a request."""
    content, headers = (folder / "model.safetensors").read_bytes(), {"Content-Type": "application/octet-stream"}
    answer = operator.post(WEIGHTS, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stamps(client: Client) -> dict[str, wire.Provenance]:
    return {one.id: one.stamp for one in client.models()}


def test_weights_of_one_model_change_while_jobs_of_all_run(
    stack: Stack, models: Models, alice: Client, operator: httpx.Client
):
    before = stamps(alice)
    versions = {0: models.students[0]}
    submitted = submit_all(alice, range(3))
    for start, folder in ((10, models.students[1]), (20, models.students[2])):
        submitted |= submit_all(alice, range(start, start + 3))
        pushed = push(operator, folder) if start == 10 else send(operator, folder)
        versions[pushed["version"]] = folder
        submitted |= (later := submit_all(alice, range(start + 3, start + 5)))
        next(job for job, (kind, _) in later.items() if kind == "student").result(timeout_s=120)  # before another push

    found = {job: job.result(timeout_s=120) for job in submitted}

    for job, (kind, seed) in submitted.items():
        check(found[job], kind, seed, models, versions)
    assert {found[job].stamp.weights_version for job, (kind, _) in submitted.items() if kind == "student"} >= {1, 2}
    after = stamps(alice)
    assert {name: after[name] for name in ("teacher", "judge")} == {name: before[name] for name in ("teacher", "judge")}
    assert after["student"].weights_version == 2
    assert after["student"].fingerprint == pushed["fingerprint"] != before["student"].fingerprint


def test_adapters_of_one_model_of_both_formats(stack: Stack, models: Models, alice: Client, operator: httpx.Client):
    for name, folder in models.adapters.items():
        body = {"lora_name": name, "lora_path": str(folder), "model": "student"}
        loaded = operator.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
    versions = {2: models.students[2]}

    submitted = {seed: submit_all(alice, range(seed, seed + 2), name) for seed, name in ((0, "style"), (4, "taught"))}

    for jobs in submitted.values():
        for job, (kind, seed) in jobs.items():
            check(job.result(timeout_s=120), kind, seed, models, versions)
    [named] = alice.score("style", [(row(1)[:5], row(1)[5:])]).sequences
    assert named.logprobs == pytest.approx(logprobs_of(models.student(versions[2], "style"), row(1), 5), abs=1e-4)
    with pytest.raises(ScorepoolError) as refused:
        alice.score("teacher", [(row(1)[:5], row(1)[5:])], adapter="style")
    assert refused.value.status == 404
    adapters = {one.id: [each.name for each in one.adapters] for one in alice.models()}
    assert adapters == {"teacher": [], "student": ["style", "taught"], "judge": []}


@contextmanager
def restarting(stack: Stack) -> Iterator[None]:
    """Restart what ends."""
    ended = Event()

    def restart() -> None:
        while not ended.wait(0.2):
            stack.restart_dead()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(restart)
        try:
            yield
        finally:
            ended.set()
            running.result()


def test_kill_9_in_the_middle_of_a_push_loses_no_job_of_any_model(
    stack: Stack, models: Models, alice: Client, operator: httpx.Client
):
    versions = {2: models.students[2], 3: models.students[1]}
    submitted = submit_all(alice, range(30, 34), "taught")
    with restarting(stack), ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(operator.post, WEIGHTS, json={"path": str(models.students[1])})
        time.sleep(0.3)
        os.kill(stack.pid(WORKER), signal.SIGKILL)
        submitted |= submit_all(alice, range(40, 42), "style")
        found = {job: job.result(timeout_s=120) for job in submitted}
        answer = pushing.result()

    for job, (kind, seed) in submitted.items():
        check(found[job], kind, seed, models, versions)
    state = operator.get(WEIGHTS).json()
    assert state["version"] == (3 if answer.status_code == 200 else state["version"])
    assert state["version"] in versions
    assert [worker["version"] for worker in state["workers"]] == [state["version"]]


def test_1000_jobs_of_one_owner_do_not_stop_another_owner_of_another_model(stack: Stack, alice: Client):
    many = [
        wire.Generate(model="teacher", prompt=row(seed), max_tokens=40, ignore_eos=True, seed=seed)
        for seed in range(1000)
    ]
    handles = alice.submit_many(many)
    waits_s = {}
    with Client(stack.url, BOB) as bob:
        for model in ("student", "judge", "teacher"):
            since = time.monotonic()
            bob.submit(request(model, 1, None)).result(timeout_s=60)
            waits_s[model] = time.monotonic() - since
    assert sum(job.status().status == "finished" for job in handles[::50]) < 15, waits_s
    os.kill(stack.pid(WORKER), signal.SIGKILL)  # the others need not be drained
