"""Jobs through real processes, which are killed meanwhile: HTTP, Redis, RQ's command line, MLX, webhooks."""

import math
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import Client, JobFailed, store, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack, rq

SECRET = "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run every process on the demo model and restart those that die, as `scorepool serve` does."""
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "1",
        "SCOREPOOL_MAX_QUEUE_DEPTH": "1000",
    }
    state = tmp_path_factory.mktemp("stack")
    stopped = threading.Event()
    model = f"demo={root / 'scorepool' / 'models' / 'demo'}"
    with Stack([model], state=state, environ=environ, logs=state / "logs") as stack:

        def restart_dead() -> None:
            while not stopped.wait(0.2):
                stack.restart_dead()

        restarter = threading.Thread(target=restart_dead)
        restarter.start()
        yield stack
        stopped.set()
        restarter.join()


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


@pytest.fixture
def redis(stack: Stack) -> Iterator[Redis]:
    with Redis.from_url(stack.redis_url) as redis:
        yield redis


def job_of_size(size: int, seed: int) -> wire.Request:
    """Make a job: 0, one short score; 1, four scores of a shared prompt; 2, sixty generated tokens."""
    rng = random.Random(seed)
    words = [rng.choice(["return", "the", "value", "of", "a", "list", "object", "when", "it", "is"]) for _ in range(12)]
    text = " ".join(words)
    if size == 0:
        return wire.Score(model="demo", items=[wire.ScoreItem(prompt=text, completion=" none.")])
    if size == 1:
        items = [wire.ScoreItem(prompt=text, completion=f" {word} ends.") for word in words[:4]]
        return wire.Score(model="demo", items=items, score="all", top_logprobs=5, rank=True, entropy=True)
    return wire.Generate(model="demo", prompt=text, max_tokens=60, seed=seed, top_logprobs=2)


def mixed_jobs(count: int) -> list[wire.Request]:
    return [job_of_size(index % 3, index) for index in range(count)]


def assert_answers(request: wire.Request, result: wire.Result) -> None:
    """Assert that the result has the requested sequences and consistent columns."""
    expected = len(request.items) if isinstance(request, wire.Score) else request.n
    assert len(result.sequences) == expected
    for sequence in result.sequences:
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.token_ids) == len(sequence.token_bytes)
        assert all(value <= 0 for value in sequence.logprobs[sequence.num_reported_prompt_tokens :])
        assert b"".join(sequence.token_bytes).decode(errors="replace").startswith(sequence.text[:1])
        first = sequence.logprobs[0]
        assert math.isnan(first) == (sequence.num_reported_prompt_tokens > 0)


def times_done(redis: Redis, ids: list[str]) -> Counter[str]:
    """Count how often each job was announced as ended."""
    entries = redis.xrange(store.DONE)
    submitted = set(ids)
    return Counter(job_id for _, fields in entries if (job_id := fields[b"id"].decode()) in submitted)


def test_two_hundred_mixed_jobs_are_each_answered_once(client: Client, redis: Redis):
    requests = mixed_jobs(200)
    ids = [job.id for job in client.submit_many(requests)]
    assert len(set(ids)) == 200
    for job_id, request in zip(ids, requests, strict=True):
        assert_answers(request, client.result(job_id, timeout_s=200))
    assert times_done(redis, ids) == dict.fromkeys(ids, 1)


def test_all_jobs_end_once_when_the_worker_is_killed(stack: Stack, client: Client, redis: Redis):
    requests = mixed_jobs(60)
    ids = [job.id for job in client.submit_many(requests)]
    wait_for(lambda: times_done(redis, ids), "the first job to end")
    os.kill(stack.pid("worker demo"), signal.SIGKILL)
    for job_id, request in zip(ids, requests, strict=True):
        assert_answers(request, client.result(job_id, timeout_s=200))
    assert times_done(redis, ids) == dict.fromkeys(ids, 1)


def test_no_accepted_job_is_lost_when_redis_is_killed(stack: Stack, client: Client):
    requests = mixed_jobs(60)
    ids = [job.id for job in client.submit_many(requests[:30])]
    assert stack.redis is not None
    assert stack.redis.process is not None
    os.kill(stack.redis.process.pid, signal.SIGKILL)
    ids += [client.submit(request).id for request in requests[30:]]  # the SDK retries while Redis is down
    for job_id, request in zip(ids, requests, strict=True):
        assert_answers(request, client.result(job_id, timeout_s=200))


def test_a_redis_that_does_not_start_is_retried(stack: Stack, client: Client, caplog: pytest.LogCaptureFixture):
    job_id = client.submit(job_of_size(2, 0))
    assert_answers(job_of_size(2, 0), client.result(job_id))
    assert stack.redis is not None
    assert stack.redis.process is not None
    [manifest] = stack.redis.folder.glob("appendonlydir/*.manifest")
    original = manifest.read_bytes()
    manifest.write_bytes(b"not a manifest")
    os.kill(stack.redis.process.pid, signal.SIGKILL)
    wait_for(lambda: "redis does not start" in caplog.text, "a start that fails")

    manifest.write_bytes(original)

    assert_answers(job_of_size(2, 0), client.result(job_id, timeout_s=200))
    assert_answers(job_of_size(2, 1), client.result(client.submit(job_of_size(2, 1)), timeout_s=200))


def test_no_accepted_job_is_lost_when_the_api_is_killed(stack: Stack, client: Client, redis: Redis):
    requests = mixed_jobs(30)
    ids = [job.id for job in client.submit_many(requests)]
    os.kill(stack.pid("api"), signal.SIGKILL)
    for job_id, request in zip(ids, requests, strict=True):
        assert_answers(request, client.result(job_id, timeout_s=200))
    assert times_done(redis, ids) == dict.fromkeys(ids, 1)


def test_waits_and_streams_outlive_an_api_that_is_killed(stack: Stack, client: Client):
    long = wire.Generate(model="demo", prompt="Return", max_tokens=1500, temperature=1.0, seed=1, logit_bias=NO_END)
    streamed = client.submit(replace(long, stream=True))
    awaited = client.submit(long)
    requests = mixed_jobs(40)
    token_ids: list[int] = []

    def read_tokens() -> None:
        for delta in streamed:
            token_ids.extend(delta.token_ids)

    def gather() -> list[wire.Job]:
        return list(client.gather(requests, max_in_flight=8))

    with ThreadPoolExecutor(3) as threads:
        gathering, waiting, reading = (
            threads.submit(gather),
            threads.submit(awaited.result),
            threads.submit(read_tokens),
        )
        wait_for(lambda: token_ids, "the first token")
        os.kill(stack.pid("api"), signal.SIGKILL)
        jobs, result = gathering.result(200), waiting.result(200)
        reading.result(200)

    for request, job in zip(requests, jobs, strict=True):
        assert job.result is not None
        assert_answers(request, job.result)
    assert len(result.sequences[0].token_ids) == 1500
    assert token_ids == streamed.result().sequences[0].token_ids


def test_the_guide_of_the_sdk_runs(stack: Stack, root: Path, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/sdk.md").read_text(), re.DOTALL)
    guide = "\n".join(blocks).replace("http://127.0.0.1:8000", stack.url)
    names: dict[str, Any] = {}
    exec(compile(guide, "docs/sdk.md", "exec"), names)
    assert names["receive"](b"{}", {}, [SECRET]) == 400
    printed = capsys.readouterr().out  # with sampled texts, which may hold any word
    assert not re.search(r"code='invalid'|^[0-9a-f]{32} invalid$", printed, re.MULTILINE)
    names["client"].close()


NO_END = {0: -100.0, 2: -100.0}  # ban both end tokens
LONG = wire.Generate(model="demo", prompt="Return", max_tokens=2000, temperature=1.0, seed=1, n=4, logit_bias=NO_END)


def test_a_running_job_can_be_canceled(client: Client):
    job_id = client.submit(LONG)
    wait_for(lambda: client.job(job_id).status == "started", "the job to start")
    client.cancel(job_id)
    job = client.job(job_id, wait_s=60)
    assert job.status == "canceled"
    assert job.failure is not None
    assert job.failure.code == "canceled"


def test_a_queued_job_can_be_canceled(stack: Stack, client: Client):
    with frozen(stack.pid("worker demo")):
        client.submit_many([job_of_size(0, 1)] * 5)  # Redis leases a worker that waits at most four
        job_id = client.submit(job_of_size(0, 1))
        assert client.cancel(job_id).status == "canceled"
    with pytest.raises(JobFailed) as caught:
        client.result(job_id, timeout_s=60)
    assert caught.value.failure.code == "canceled"
    assert client.job(client.submit(job_of_size(0, 1)), wait_s=60).status == "finished"


def test_the_timeout_of_one_job_does_not_affect_others(client: Client):
    late = client.submit(replace(LONG, n=16, timeout_s=1))
    others = client.submit_many(mixed_jobs(30))
    with pytest.raises(JobFailed) as caught:
        client.result(late, timeout_s=60)
    assert caught.value.failure.code == "timeout"
    for job_id, request in zip(others, mixed_jobs(30), strict=True):
        assert_answers(request, client.result(job_id, timeout_s=200))


def test_a_prompt_beyond_the_context_fails_with_the_reason(client: Client):
    with pytest.raises(JobFailed) as caught:
        client.score("demo", [("word " * 20_000, "end")])
    assert caught.value.failure.code == "too_long"
    assert str(client.models()[0].context_length) in caught.value.failure.message


def test_an_empty_prompt_of_a_model_without_bos_is_a_failure_that_names_the_field(client: Client):
    with pytest.raises(JobFailed) as caught:
        client.generate("demo", "")
    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", "prompt")


def test_a_text_of_megabytes_is_refused_while_other_jobs_run(client: Client):
    huge = client.submit(wire.Score(model="demo", items=[wire.ScoreItem(prompt="é" * 3_000_000, completion="b")]))
    assert_answers(job_of_size(0, 1), client.result(client.submit(job_of_size(0, 1)), timeout_s=60))
    with pytest.raises(JobFailed) as caught:
        client.result(huge, timeout_s=60)
    assert caught.value.failure.code == "too_long"


def test_a_result_has_the_provenance_of_its_model(client: Client):
    model = client.models()[0]
    assert client.score("demo", [("a", "b")]).stamp == model.stamp
    assert model.stamp.fingerprint
    assert set(model.stamp.versions) >= {"scorepool", "mlx", "mlx-lm"}


def test_rq_info_shows_the_queue(stack: Stack, client: Client):
    assert client.score("demo", [("a", "b")])
    listed = subprocess.run(
        [rq(), "info", "--url", stack.redis_url, "demo"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "demo" in listed


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait until the condition is true; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop the process while the context is open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
