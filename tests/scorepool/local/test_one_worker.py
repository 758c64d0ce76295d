"""`scorepool serve --one-worker`: several models in one process through a whole stack, also after kill -9."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack, StackError
from scorepool.wire import Generate, Score, ScoreItem
from tests.engine.oracle import Oracle
from tests.tiny_classifiers import build
from tests.tiny_models import TinyModels

pytestmark = pytest.mark.timeout(240)
NAMES = ("teacher", "student", "judge")
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folders(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    judge = tmp_path_factory.mktemp("judge")
    build(judge, "qwen2", num_labels=3)
    return {"teacher": tiny_models("qwen3"), "student": tiny_models("llama"), "judge": judge}


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_MEMORY_BYTES": "900000",
        "SCOREPOOL_PREFIX_CACHE_BYTES": "0",
        "SCOREPOOL_MAX_RUNNING_ROWS": "8",
        "SCOREPOOL_MODEL_TURN_S": "1",
        "SCOREPOOL_LEASE_S": "3",
        "SCOREPOOL_RESULT_CACHE_BYTES": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    specs = [f"{name}={folder}" for name, folder in folders.items()]
    with Stack(specs, state=state, environ=environ, logs=state / "logs", one_worker=True) as stack:
        yield stack


def expected(folder: Path, token_ids: list[int], first: int) -> list[float]:
    table = Oracle(folder).logprobs(token_ids)
    return [table[at - 1, token_ids[at]] for at in range(first, len(token_ids))]


def test_each_model_is_listed_and_answers_with_its_own_numbers(stack: Stack, folders: dict[str, Path]):
    with Client(stack.url) as client:
        served = {one.id: one for one in client.models()}
        assert set(served) == set(NAMES)
        assert len({one.worker for one in served.values()}) == 1
        assert len({one.stamp.fingerprint for one in served.values()}) == 3
        for name in ("teacher", "student"):
            result = client.score(name, [[10, 11, 12]], prompt=PROMPT)
            assert list(result.sequences[0].logprobs or ()) == pytest.approx(
                expected(folders[name], [*PROMPT, 10, 11, 12], 5), abs=1e-4
            )
            job = client.submit(
                Generate(model=name, prompt=PROMPT, max_tokens=6, temperature=0.0, stream=True, logprobs=True)
            )
            streamed = [delta for delta in job if delta.token_ids]
            answer = job.result(timeout_s=60).sequences[0]
            assert [token_id for delta in streamed for token_id in delta.token_ids] == list(answer.token_ids)
            assert list(answer.logprobs or ()) == pytest.approx(
                expected(folders[name], [*PROMPT, *answer.token_ids], 5), abs=1e-4
            )
        assert len(client.classify("judge", [PROMPT]).classifications) == 1


def test_kill_9_of_the_worker_loses_no_job_of_any_model(stack: Stack):
    name = f"worker {','.join(NAMES)}"
    stop = [False]

    def restart() -> None:
        while not stop[0]:
            stack.restart_dead()
            time.sleep(0.2)

    with Client(stack.url) as client:
        jobs = [
            client.submit(Score(model=model, items=[ScoreItem(prompt=PROMPT, completion=[seed + 4, 11, 12])]))
            for seed in range(30)
            for model in ("teacher", "student")
        ]
        os.kill(stack.pid(name), signal.SIGKILL)
        thread = Thread(target=restart)
        thread.start()
        try:
            for job in jobs:
                assert job.result(timeout_s=120).sequences
        finally:
            stop[0] = True
            thread.join()


def test_a_model_that_cannot_be_loaded_ends_the_start_by_name(folders: dict[str, Path], tmp_path: Path):
    specs = [f"teacher={folders['teacher']}", "student=/no/such/folder"]
    environ = {"SCOREPOOL_PORT": str(free_port())}
    with (
        pytest.raises(StackError, match="model 'student': there is no folder '/no/such/folder'"),
        Stack(specs, state=tmp_path, environ=environ, logs=tmp_path / "logs", one_worker=True),
    ):
        pass


@pytest.mark.parametrize("command", [["serve", "--one-worker"], ["worker"]])
def test_a_name_that_is_given_twice_is_refused(command: list[str], folders: dict[str, Path]):
    models = [f"--model=a={folders['teacher']}", f"--model=b,a={folders['student']}"]
    found = subprocess.run(
        [str(Path(sys.executable).with_name("scorepool")), *command, *models],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1
    assert "a" in found.stderr
    assert "given" in found.stderr
