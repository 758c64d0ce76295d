"""One worker process of several models: the numbers of each, its queues, its entry, and what kill -9 leaves."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from redis import Redis

from scorepool import store, wire
from scorepool.store import Keys
from scorepool.worker.inference.configured_adapters import check_models_of_adapters
from scorepool.worker.inference.configured_models import configured_models
from tests.engine.oracle import Oracle
from tests.tiny_classifiers import build, logits_of
from tests.tiny_models import TinyModels
from tests.worker.conftest import Workers, done, outcome, status, submit, until

pytestmark = pytest.mark.timeout(240)
REAL = "scorepool.worker.BatchWorker"
NAMES = ("teacher", "student", "judge")
HOLDS_ONE = {  # memory for any of the models, and no two of them
    "SCOREPOOL_MEMORY_BYTES": str(900_000),
    "SCOREPOOL_PREFIX_CACHE_BYTES": "0",
    "SCOREPOOL_MAX_RUNNING_ROWS": "8",
    "SCOREPOOL_MODEL_TURN_S": "1",
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("judge")
    return folder, build(folder, "qwen2", num_labels=3)


@pytest.fixture
def folders(tiny_models: TinyModels, judge: tuple[Path, torch.nn.Module]) -> dict[str, Path]:
    return {"teacher": tiny_models("qwen3"), "student": tiny_models("llama"), "judge": judge[0]}


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(workers: Workers, redis: Redis, folders: dict[str, Path]) -> Start:
    def start(*names: str, name: str = "mac", **environ: str) -> subprocess.Popen[bytes]:
        specs = ";".join(f"{one}={folders[one]}" for one in names)
        settings = {"OPENBLAS_NUM_THREADS": "1", "SCOREPOOL_LEASE_S": "5"}
        variable = "SCOREPOOL_MODELS" if len(names) > 1 else "SCOREPOOL_MODEL"
        unset = {"SCOREPOOL_MODEL": ""} if len(names) > 1 else {}
        process = workers.start(
            *("--name", name),
            worker=REAL,
            queues=tuple(queue for one in names for queue in store.queue_names(one)),
            **(unset | {variable: specs} | settings | environ),
        )
        until(lambda: len(cards(redis, name)) == len(names) or process.poll() is not None, 120)
        return process

    return start


def cards(redis: Redis, worker: str) -> dict[str, wire.ServedModel]:
    """Return what a worker shows, by model."""
    found = [redis.get(Keys.served_model(member.decode())) for member in redis.zrange(Keys.models, 0, -1)]
    shown = [wire.parse(card, wire.ServedModel, "msgpack") for card in found if card]
    return {one.id: one for one in shown if one.worker == worker}


def rows(seed: int) -> list[list[int]]:
    return [[(7 * seed + 3 * row + 11 * place) % 240 + 4 for place in range(12 + seed % 9)] for row in range(2)]


def request(name: str, seed: int) -> wire.Request:
    if name == "judge":
        return wire.Classify(model=name, items=[wire.ClassifyItem(prompt=row) for row in rows(seed)])
    if seed % 2:
        return wire.Generate(
            model=name, prompt=rows(seed)[0], max_tokens=6, temperature=0.0, stream=bool(seed % 4 == 1), logprobs=True
        )
    items = [wire.ScoreItem(prompt=row[:5], completion=row[5:]) for row in rows(seed)]
    return wire.Score(model=name, items=items, temperature=0.7)


def assert_equals_transformers(
    name: str, seed: int, found: wire.Outcome | None, oracles: dict[str, Oracle], judge: torch.nn.Module
) -> None:
    assert isinstance(found, wire.Result), found
    assert found.stamp.model == name
    if name == "judge":
        for row, classified in zip(rows(seed), found.classifications, strict=True):
            assert list(classified.logits) == pytest.approx(logits_of(judge, row), abs=1e-4)
        return
    for row, sequence in zip(rows(seed)[: len(found.sequences)], found.unpacked().sequences, strict=True):
        temperature = 1.0 if seed % 2 else 0.7
        token_ids = row + sequence.token_ids if seed % 2 else row
        first = len(row) if seed % 2 else 5
        table = oracles[name].logprobs(token_ids, temperature)
        expected = [table[at - 1, token_ids[at]] for at in range(first, len(token_ids))]
        assert sequence.logprobs is not None
        assert list(sequence.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("memory", [{}, HOLDS_ONE], ids=["holds all", "holds one"])
def test_jobs_of_three_models_equal_transformers_interleaved(
    redis: Redis,
    workers: Workers,
    start: Start,
    tiny_models: TinyModels,
    judge: tuple[Path, torch.nn.Module],
    memory: dict[str, str],
):
    start(*NAMES, **memory)
    began_at = time.monotonic()
    ids = {submit(redis, request(name, seed), queue=name): (name, seed) for seed in range(20) for name in NAMES}
    until(lambda: set(ids) <= set(done(redis)), 120)
    turns = (time.monotonic() - began_at) / 1.0
    oracles = {"teacher": Oracle(tiny_models("qwen3")), "student": Oracle(tiny_models("llama"))}
    for job_id, (name, seed) in ids.items():
        assert_equals_transformers(name, seed, outcome(redis, job_id), oracles, judge[1])
    assert workers.log.count("loaded the weights again") <= (10 + 2 * turns if memory else 0)
    assert len(cards(redis, "mac")) == 3
    until(
        lambda: (
            sum(bool(one.load and one.load.is_loaded) for one in cards(redis, "mac").values()) == (1 if memory else 3)
        )
    )
    assert cards(redis, "mac")["judge"].classifier is not None


def test_200_alternating_jobs_of_two_models_that_do_not_fit_together_need_few_loads(
    redis: Redis, workers: Workers, start: Start
):
    start("teacher", "student", **HOLDS_ONE)
    began_at = time.monotonic()
    ids = [submit(redis, request(name, seed), queue=name) for seed in range(100) for name in ("teacher", "student")]
    until(lambda: set(ids) <= set(done(redis)), 120)
    turns = (time.monotonic() - began_at) / 1.0
    assert workers.log.count("loaded the weights again") <= 2 + 2 * turns


@pytest.mark.soak  # counts what a second is enough for; tests/engine/test_residency.py has turns on a clock of its own
def test_two_clients_that_wait_for_each_job_share_the_memory_by_turns(redis: Redis, workers: Workers, start: Start):
    """Neither model is dropped for each job of the other, and none waits longer than a turn and two loads."""
    start("teacher", "student", **HOLDS_ONE)
    waits_s: dict[str, list[float]] = {"teacher": [], "student": []}
    running = {name: (submit(redis, request(name, 0), queue=name), time.monotonic()) for name in waits_s}
    ends_at = time.monotonic() + 8
    while time.monotonic() < ends_at:
        for name, (job_id, since) in running.items():
            if redis.exists(Keys.outcome(job_id)):
                waits_s[name].append(time.monotonic() - since)
                running[name] = (submit(redis, request(name, len(waits_s[name])), queue=name), time.monotonic())
        time.sleep(0.002)
    num_jobs, num_loads = sum(map(len, waits_s.values())), workers.log.count("loaded the weights again")
    assert num_loads <= 14
    assert num_jobs > 3 * num_loads
    assert max(max(waits_s["teacher"]), max(waits_s["student"])) < 5


@pytest.mark.soak
def test_kill_9_loses_no_job_and_a_worker_of_one_of_the_models_takes_its_jobs(
    redis: Redis, workers: Workers, start: Start, folders: dict[str, Path]
):
    process = start(*NAMES, **HOLDS_ONE)
    slow = {name: wire.Generate(model=name, prompt=[5, 6, 7], max_tokens=200, ignore_eos=True) for name in NAMES[:2]}
    ids = {name: [submit(redis, slow[name], queue=name) for _ in range(12)] for name in slow}
    until(lambda: any(status(redis, job_id) == "started" for job_id in ids["teacher"]))
    process.kill()
    process.wait()
    start("student", name="other")
    until(lambda: set(ids["student"]) <= set(done(redis)), 120)
    start(*NAMES, name="again")
    until(lambda: set(ids["teacher"]) <= set(done(redis)), 120)
    ended = done(redis)
    assert len(ended) == len(set(ended))
    assert all(isinstance(outcome(redis, job_id), wire.Result) for listed in ids.values() for job_id in listed)


@pytest.mark.soak
def test_a_worker_that_has_the_weights_gets_the_jobs(redis: Redis, workers: Workers, start: Start):
    """The other one, whose memory another model has, leaves them to it."""
    start("teacher", "student", name="both", **HOLDS_ONE)
    busy = wire.Generate(model="teacher", prompt=[5, 6, 7], max_tokens=300, ignore_eos=True)
    kept = [submit(redis, busy, queue="teacher") for _ in range(40)]
    start("student", name="single")
    until(lambda: any(status(redis, job_id) == "started" for job_id in kept))
    ids = [submit(redis, request("student", seed), queue="student") for seed in range(30)]
    until(lambda: set(ids) <= set(done(redis)), 120)
    ran_on = [(redis.hget(f"rq:job:{job_id}", "worker_name") or b"").decode() for job_id in ids]
    assert ran_on.count("both") <= 2


def test_a_model_without_jobs_drops_its_weights_while_another_works(redis: Redis, workers: Workers, start: Start):
    start("teacher", "student", SCOREPOOL_IDLE_UNLOAD_S="0.5")
    busy = wire.Generate(model="teacher", prompt=[5, 6, 7], max_tokens=300, ignore_eos=True)
    running = [submit(redis, busy, queue="teacher") for _ in range(2)]
    ids = [submit(redis, request("student", seed), queue="student") for seed in range(3)]

    def loaded() -> list[bool]:
        shown = cards(redis, "mac")
        return [bool(shown[name].load and shown[name].load.is_loaded) for name in ("teacher", "student")]

    while not (set(ids) <= set(done(redis)) and loaded() == [True, False]):
        if not set(done(redis)).isdisjoint(running):  # the teacher is never idle
            running = [submit(redis, busy, queue="teacher") for _ in range(2)]
        time.sleep(0.02)
    num_loads = workers.log.count("loaded the weights again")
    late = submit(redis, request("student", 9), queue="student")
    until(lambda: late in done(redis))
    assert isinstance(outcome(redis, late), wire.Result)
    assert workers.log.count("loaded the weights again") == num_loads + 1


def test_crosschecks_go_to_another_process_that_serves_the_same_weights(
    redis: Redis, start: Start, folders: dict[str, Path]
):
    """Never to a second name of the same process."""
    crosscheck = {"SCOREPOOL_CROSSCHECK": "1", "SCOREPOOL_MAX_JOBS_IN_FLIGHT": "4"}
    folders["reference"] = folders["teacher"]
    scores = [(name, seed) for seed in (2, 4, 6) for name in ("teacher", "reference")]
    start("teacher", "reference", name="other", **crosscheck)
    alone = [submit(redis, request(name, seed), queue=name) for name, seed in scores]
    until(lambda: set(alone) <= set(done(redis)))
    start("teacher", "student", name="mac", **crosscheck)
    ids = [submit(redis, request(name, seed), queue=name) for name, seed in [*scores, ("student", 2)]]
    until(lambda: set(ids) <= set(done(redis)))
    until(lambda: redis.hgetall(Keys.crosscheck_counts) == {b"agreed": b"6"})  # nobody else has the student


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ("teacher={teacher};teacher={student}", "the name 'teacher' is given to two models"),
        ("teacher={teacher};student,teacher={student}", "the name 'teacher' is given to two models"),
        ("teacher={teacher};student=/no/such/folder", "model 'student': there is no folder '/no/such/folder'"),
        ("teacher={teacher};student={damaged}", "model 'student': config.json: model_type is None"),
        ("teacher={teacher};student", "expected NAME"),
    ],
)
def test_a_model_that_cannot_be_served_refuses_the_start_by_name(
    workers: Workers, folders: dict[str, Path], tmp_path: Path, models: str, reason: str
):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{}")
    (tmp_path / "damaged" / "model.safetensors").write_text("no")
    spec = models.format(**folders, damaged=tmp_path / "damaged")
    process = workers.start(worker=REAL, queues=("teacher", "student"), SCOREPOOL_MODEL="", SCOREPOOL_MODELS=spec)
    assert process.wait(timeout=120) == 1
    last = workers.log.splitlines()[-1]
    assert re.search(reason, last), last
    assert last.startswith("scorepool: ")


def test_a_budget_that_is_too_small_for_one_of_the_models_refuses_the_start_by_name(workers: Workers, start: Start):
    process = start(*NAMES, SCOREPOOL_MEMORY_BYTES="50000")
    assert process.wait(timeout=120) == 1
    assert workers.log.splitlines()[-1].startswith("scorepool: model 'teacher': no memory is left for KV caches")


def test_the_queues_of_the_command_must_fit_the_models():
    settings = store.Settings.load({"SCOREPOOL_MODELS": "a=/a; b,c=/b"})
    found = configured_models(settings, ["b:high", "a", "b", "c"])
    assert [(one.names, one.source, one.queues) for one in found] == [
        (["a"], "/a", ["a"]),
        (["b", "c"], "/b", ["b:high", "b", "c"]),
    ]
    with pytest.raises(store.SettingsError, match="queue 'd' is not one of those of SCOREPOOL_MODELS"):
        configured_models(settings, ["a", "b", "d"])
    with pytest.raises(store.SettingsError, match="model 'a' is given none of its queues: add a:high a a:low"):
        configured_models(settings, ["b"])
    with pytest.raises(store.SettingsError, match="are both set"):
        store.Settings.load({"SCOREPOOL_MODELS": "a=/a", "SCOREPOOL_MODEL": "b=/b"})


def test_an_adapter_must_say_which_of_the_models_it_belongs_to():
    settings = store.Settings.load({"SCOREPOOL_MODELS": "a=/a;b=/b", "SCOREPOOL_ADAPTERS": "french=/f"})
    with pytest.raises(store.SettingsError, match=r"french=/f: this worker serves several models; .*of a, b"):
        check_models_of_adapters(settings, [["a"], ["b"]])
    check_models_of_adapters(settings, [["a"]])
    settings = store.Settings.load({"SCOREPOOL_MODELS": "a=/a;b=/b", "SCOREPOOL_ADAPTERS": "b@a=/f"})
    with pytest.raises(store.SettingsError, match="adapter 'b': the name is taken by a model"):
        check_models_of_adapters(settings, [["a"], ["b"]])
