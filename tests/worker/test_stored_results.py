"""Results that are too large for Redis, through real processes: visible once, never lost, deleted with their jobs."""

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import Client, wire
from scorepool.store import Keys, Settings
from scorepool.store.result_store import open_result_store, path_of_lease
from scorepool.wire.stored_result import StoredResult, decode_recorded, to_frames
from scorepool.worker.inference.comparison_run import BaseIsPending, ComparisonRun
from scorepool.worker.rq.errors import JobError
from tests.api.fake_worker import RESULT
from tests.api.test_process import running
from tests.worker.conftest import Workers, failure, generate, outcome, status, submit, until

SMALL = "1000"  # bytes of a result in Redis: one of a token has less, one of LARGE tokens more
LARGE = 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def stored(redis: Redis, job_id: str) -> StoredResult:
    until(lambda: redis.exists(Keys.outcome(job_id)))
    found = decode_recorded(redis.get(Keys.outcome(job_id)))
    assert isinstance(found, StoredResult), found
    return found


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def check_now(redis: Redis) -> None:
    """Let all objects be due for their check."""
    for lease_key in redis.zrange(Keys.stored_results, 0, -1):
        redis.zadd(Keys.stored_results, {lease_key: 0})


def environ(folder: Path) -> dict[str, str]:
    return {
        "SCOREPOOL_RESULT_STORE": folder.as_uri(),
        "SCOREPOOL_MAX_INLINE_RESULT_BYTES": SMALL,
        "FAKE_STEP_S": "0.001",
    }


def batch_file() -> bytes:
    body = {"model": "demo", "prompt": "hello", "max_tokens": LARGE}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def check_formats(http: httpx.Client, redis: Redis, job_id: str) -> dict[str, Any]:
    """Compare replies that are streamed from the store with those of the same result in Redis; return the job."""
    recorded = redis.get(Keys.outcome(job_id))
    job = {}
    formats: tuple[wire.Format, ...] = ("json", "msgpack")
    streamed = {one: http.get(f"/v1/jobs/{job_id}", headers={"Accept": f"application/{one}"}) for one in formats}
    parsed = {one: wire.parse(reply.content, wire.Job, one) for one, reply in streamed.items()}
    redis.set(Keys.outcome(job_id), wire.encode(parsed["msgpack"].result), keepttl=True)
    for one in formats:
        in_redis = http.get(f"/v1/jobs/{job_id}", headers={"Accept": f"application/{one}"})
        assert in_redis.headers["content-type"] == streamed[one].headers["content-type"] == f"application/{one}"
        assert "content-length" not in streamed[one].headers
        assert wire.parse(in_redis.content, wire.Job, one) == parsed[one]
        if one == "json":
            assert in_redis.content == streamed[one].content
            job = in_redis.json()
    redis.set(Keys.outcome(job_id), recorded, keepttl=True)
    return job


def check_batch(http: httpx.Client) -> None:
    """Run a batch, whose output holds the results."""
    file = http.post("/v1/files", files={"file": ("a.jsonl", batch_file())}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = http.post("/v1/batches", json=asked).json()["id"]
    until(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
    batch = http.get(f"/v1/batches/{batch_id}").json()
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    lines = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines] == ["x" * LARGE] * 3


def test_every_way_of_reading_gives_the_result_and_deletion_deletes_it(
    redis: Redis, redis_url: str, workers: Workers, root: Path, tmp_path: Path, folder: Path
):
    workers.start("--name", "w", **environ(folder))
    with running(root, redis_url, tmp_path / "api.log", result_store=folder.as_uri()) as (http, _):
        until(lambda: redis.exists(Keys.served_model("w")))
        items = [{"prompt": "hello", "completion": "x" * number} for number in range(1, 40)]
        sent = {"type": "score", "model": "demo", "items": items, "top_logprobs": 2}
        reply = http.post("/v1/jobs", json=sent, headers={"Prefer": "wait=50"})
        assert reply.status_code == 200, reply.text
        job_id = reply.json()["id"]
        assert stored(redis, job_id).num_sequences == 39
        assert redis.strlen(Keys.outcome(job_id)) < 200

        job = check_formats(http, redis, job_id)
        assert reply.json() == job
        assert [sequence["text"] for sequence in job["result"]["sequences"]] == ["x" * i for i in range(1, 40)]
        with Client(str(http.base_url)) as client:
            assert [sequence.text for sequence in client.result(job_id).sequences] == ["x" * i for i in range(1, 40)]
        events = http.get(f"/v1/jobs/{job_id}/events").text
        assert json.loads(events.split("data: ")[-1].split("\n")[0])["result"] == job["result"]
        assert "x" * 30 in http.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
        completed = http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": LARGE})
        assert completed.json()["choices"][0]["text"] == "x" * LARGE
        check_batch(http)
        assert len(objects(folder)) == 5

        assert http.delete(f"/v1/jobs/{job_id}").status_code == 204
        until(lambda: len(objects(folder)) == 4)
        for key in redis.scan_iter(Keys.outcome("*")):
            redis.pexpire(key, 1)
        check_now(redis)
        until(lambda: objects(folder) == [] and not redis.exists(Keys.stored_results))
        assert "Traceback" not in (tmp_path / "api.log").read_text()


def test_an_object_of_a_job_that_is_kept_for_seconds_goes_with_it(
    redis: Redis, redis_url: str, workers: Workers, root: Path, tmp_path: Path, folder: Path
):
    with running(root, redis_url, tmp_path / "api.log", result_store=folder.as_uri()):
        job_id = submit(redis, generate(max_tokens=LARGE), fields={"owner": "local", "result_ttl": 3})
        workers.start("--name", "w", **environ(folder))
        stored(redis, job_id)
        assert len(objects(folder)) == 1
        until(lambda: objects(folder) == [] and not redis.exists(Keys.stored_results))
        assert not redis.exists(Keys.outcome(job_id))


def test_a_worker_that_is_killed_between_write_and_end_leaves_an_object_that_is_deleted(
    redis: Redis, redis_url: str, workers: Workers, root: Path, tmp_path: Path, folder: Path
):
    job_id = submit(redis, generate(max_tokens=LARGE), fields={"owner": "local"})
    dying = workers.start("--name", "dying", worker="DyingStoreWorker", **environ(folder))
    dying.wait(60)
    [orphan] = objects(folder)
    assert (status(redis, job_id), redis.exists(Keys.outcome(job_id))) == ("started", 0)

    workers.start("--name", "next", **environ(folder))
    found = stored(redis, job_id)
    assert found.execution not in orphan.name
    assert len(objects(folder)) == 2
    with running(root, redis_url, tmp_path / "api.log", result_store=folder.as_uri()) as (http, _):
        check_now(redis)
        until(lambda: not orphan.exists())
        [kept] = objects(folder)
        assert found.execution in kept.name
        job = http.get(f"/v1/jobs/{job_id}").json()
        assert (job["status"], job["result"]["sequences"][0]["text"]) == ("finished", "x" * LARGE)
        check_now(redis)
        until(
            lambda: min(score for _, score in redis.zrange(Keys.stored_results, 0, -1, withscores=True)) > time.time()
        )
        assert objects(folder) == [kept]


def test_trouble_with_the_store_ends_in_sentences_and_stops_nothing_else(
    redis: Redis, redis_url: str, workers: Workers, root: Path, tmp_path: Path, folder: Path
):
    worker = workers.start("--name", "w", **environ(folder))
    (folder / "scorepool").write_bytes(b"")  # no folder of objects can be made
    job_id = submit(redis, generate(max_tokens=LARGE), fields={"owner": "local"})
    until(lambda: "the result store does not take results, trying again" in workers.log)
    small = submit(redis, generate(max_tokens=1), fields={"owner": "local"})
    until(lambda: isinstance(outcome(redis, small), wire.Result))
    (folder / "scorepool").unlink()
    found = stored(redis, job_id)
    assert "the result store takes results again" in workers.log
    assert worker.poll() is None
    [path] = objects(folder)

    with running(root, redis_url, tmp_path / "api.log", result_store=folder.as_uri()) as (http, _):
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "finished"
        whole = path.read_bytes()
        lost = "the result of this job is missing from the result store, or damaged; submit it again"
        for broken in (whole[:-1], b"", None):
            path.unlink() if broken is None else path.write_bytes(broken)
            for accept in ("application/json", "application/msgpack"):
                reply = http.get(f"/v1/jobs/{job_id}", headers={"Accept": accept})
                job = wire.parse(reply.content, wire.Job, accept.removeprefix("application/"))  # type: ignore[arg-type]
                assert (job.status, job.failure and job.failure.message) == ("failed", lost), broken
        another = stored(redis, submit(redis, generate(max_tokens=LARGE), fields={"owner": "local"}))
        [other] = [one for one in objects(folder) if another.execution in one.name]
        assert another.num_bytes == len(whole)
        path.write_bytes(other.read_bytes())
        assert http.get(f"/v1/jobs/{job_id}").json()["failure"]["message"] == lost
        path.write_bytes(whole)
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "finished"
        assert found.num_bytes == len(whole)
        folder.rename(folder.with_name("away"))  # a share that is not mounted now
        assert http.get(f"/v1/jobs/{job_id}").status_code == 503
        folder.with_name("away").rename(folder)
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "finished"
        recorded = redis.get(Keys.outcome(job_id))
        redis.set(Keys.outcome(job_id), wire.encode(replace(found, num_sequences=7)), keepttl=True)
        for accept in ("application/json", "application/msgpack"):
            with pytest.raises(httpx.RemoteProtocolError):
                http.get(f"/v1/jobs/{job_id}", headers={"Accept": accept})
        redis.set(Keys.outcome(job_id), recorded, keepttl=True)
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(httpx.RemoteProtocolError):  # the reply has begun when the damage is found
            http.get(f"/v1/jobs/{job_id}")
        assert http.get(f"/v1/jobs/{job_id}").json()["failure"]["message"] == lost
        assert "the reply with a job is cut off: a stored result is damaged" in (tmp_path / "api.log").read_text()

    with running(root, redis_url, tmp_path / "api.log") as (http, _):  # without the setting
        reply = http.get(f"/v1/jobs/{job_id}")
        assert reply.status_code == 503
        assert "SCOREPOOL_RESULT_STORE" in reply.json()["error"]["message"]
        assert http.get(f"/v1/jobs/{small}").json()["status"] == "finished"


def test_a_store_that_takes_nothing_for_long_fails_the_job(
    redis: Redis, workers: Workers, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "scorepool").write_bytes(b"")
    job_id = submit(redis, generate(max_tokens=LARGE))
    workers.start("--name", "w", worker="ImpatientWorker", **environ(folder))
    until(lambda: redis.exists(Keys.outcome(job_id)))
    found = failure(redis, job_id)
    assert found.code == "not_stored"
    assert "which the result store has not taken for 0.5 s: " in found.message
    assert "\n" not in found.message
    assert redis.exists(Keys.request(job_id))  # so that `rq requeue` works


def test_without_a_store_a_large_result_fails_with_the_limit(redis: Redis, workers: Workers):
    large, small = submit(redis, generate(max_tokens=LARGE)), submit(redis, generate(max_tokens=1))
    workers.start("--name", "w", SCOREPOOL_MAX_INLINE_RESULT_BYTES=SMALL)
    until(lambda: outcome(redis, large) and outcome(redis, small))
    found = failure(redis, large)
    assert found.code == "not_stored"
    assert "more than the 1000 of SCOREPOOL_MAX_INLINE_RESULT_BYTES" in found.message
    assert "SCOREPOOL_RESULT_STORE" in found.message
    assert isinstance(outcome(redis, small), wire.Result)


def test_a_worker_whose_store_cannot_be_used_does_not_start(workers: Workers, tmp_path: Path):
    worker = workers.start("--name", "w", SCOREPOOL_RESULT_STORE=(tmp_path / "absent").as_uri())
    assert worker.wait(60) == 1
    assert "expected the URL of a folder that exists" in workers.log
    assert "Traceback" not in workers.log


def test_a_compare_job_reads_its_base_from_the_store(redis: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_result_store(Settings(result_store=folder.as_uri()))
    assert store is not None
    request: Any = wire.Compare(model="demo", base="base", items=[wire.ScoreItem(prompt="a", completion="b")])
    run = ComparisonRun(request, "ab" * 16, redis, store)
    name = path_of_lease(f"{run.base_job_id}:e1")
    body, path = b"".join(to_frames(RESULT, name)), folder / name
    recorded = StoredResult(execution="e1", num_bytes=len(body), num_sequences=1)
    redis.set(Keys.outcome(run.base_job_id), wire.encode(recorded))
    with pytest.raises(JobError, match="it has no such object"):
        run._read()
    store.put(name, body)
    assert wire.encode(run._read()) == wire.encode(RESULT)
    path.write_bytes(body[:-1])
    with pytest.raises(JobError, match="damaged"):
        run._read()
    redis.set(Keys.outcome(run.base_job_id), wire.encode(replace(recorded, execution="../e")))
    with pytest.raises(JobError, match="no ids"):
        run._read()

    redis.set(Keys.outcome(run.base_job_id), wire.encode(recorded))
    monkeypatch.setattr("scorepool.store.object_store.FOLDER_TIMEOUT_S", 1.0)
    path.unlink()
    os.mkfifo(path)  # whose reading hangs, as that of a share does whose server is away
    with pytest.raises(BaseIsPending):
        run._read()
    os.close(os.open(path, os.O_RDWR))  # ends the hang
