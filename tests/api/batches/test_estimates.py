"""The end of a batch is estimated from the pace of its lines."""

import time

import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import store, wire
from scorepool.api.batches import batch_store
from scorepool.api.batches.lines import job_id_of
from scorepool.api.repositories.batches import BatchProgress, estimate_end
from tests.api.batches.test_batches import has, jsonl, start, until
from tests.api.conftest import Serving, eventually
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio


def read(redis: Redis, batch_id: str) -> BatchProgress:
    return wire.parse(redis.hget(store.Keys.batch(batch_id), "state"), BatchProgress, "msgpack")


async def test_the_end_of_a_batch_is_estimated_from_its_pace(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        batch_id = await start(http, jsonl(4))
        await eventually(lambda: len(worker.waiting()) == 4)
        assert (await http.get(f"/v1/batches/{batch_id}")).json()["estimated_end_at"] is None
        worker.end(job_id_of(batch_id, 1, 0), COMPLETED)
        batch = await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 1)
        assert 0 <= batch["estimated_end_at"] - batch["in_progress_at"] < 60
        for number in (2, 3, 4):
            worker.end(job_id_of(batch_id, number, 0), COMPLETED)
        assert (await until(http, batch_id, has("completed")))["estimated_end_at"] is None


@pytest.mark.parametrize(
    ("num_ended", "first", "last", "expected"),
    [
        (0, (None, 0), None, None),
        (10, (1100.0, 10), 1100.0, 1100 + 900),  # at the same time: the pace is that since the start
        (50, (1100.0, 50), 1100.0, 1100 + 100),
        (99, (1100.0, 99), 1100.0, 1102),
        (1, (1100.0, 1), 1100.0, 5000),  # at most the expiry
        (60, (1090.0, 10), 1100.0, 1100 + 8),  # 50 in 10 s, after 90 s for the first ten
        (60, (1020.0, 10), 1030.0, 1100 + 8),  # and none since: the workers have stopped, or are about to end a group
        (60, (960.0, 10), 975.0, None),  # and none for two minutes, which is longer than all before
        (60, (1090.0, 10), None, 1100 + 8),  # a batch that began under an earlier release
        (60, (None, 0), None, 1100 + 67),
    ],
)
def test_the_rest_of_a_batch_takes_as_long_as_the_lines_before(
    num_ended: int, first: tuple[float | None, int], last: float | None, expected: int | None
):
    batch = wire.Batch(
        id="",
        endpoint="/v1/completions",
        input_file_id="",
        completion_window="24h",
        status="in_progress",
        created_at=900,
        in_progress_at=1000,
        expires_at=5000,
        request_counts=wire.RequestCounts(total=100, completed=num_ended // 2, failed=num_ended - num_ended // 2),
    )
    first_ended_at, num_first_ended = first
    progress = BatchProgress(
        batch=batch,
        output_ttl_s=1,
        first_ended_at=1010.0 if last else first_ended_at,
        mark_at=first_ended_at if last else None,
        num_at_mark=num_first_ended,
        last_ended_at=last,
    )
    assert estimate_end(progress, 1100.0) == expected


async def test_the_lines_of_the_first_group_tell_no_pace(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    """A worker computes them together: the second ends milliseconds after the first, and the next ones much later."""
    monkeypatch.setattr(batch_store, "FIRST_S", 3600.0)
    async with serving() as http:
        batch_id = await start(http, jsonl(20))
        await eventually(lambda: len(worker.waiting()) == 20)
        for number in range(1, 5):
            worker.end(job_id_of(batch_id, number, 0), COMPLETED)
            await until(http, batch_id, lambda batch, n=number: batch["request_counts"]["completed"] == n)
        group = read(redis, batch_id)
        assert group.num_at_mark == 4
        assert group.first_ended_at < group.mark_at == group.last_ended_at
        monkeypatch.setattr(batch_store, "FIRST_S", 0.0)
        worker.end(job_id_of(batch_id, 5, 0), COMPLETED)
        await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 5)
        later = read(redis, batch_id)
        assert (later.num_at_mark, later.mark_at) == (4, group.mark_at)
        assert later.last_ended_at > group.last_ended_at
        assert estimate_end(later, time.time()) == pytest.approx(
            time.time() + 15 * (later.last_ended_at - group.last_ended_at), abs=2
        )


def test_the_slow_start_of_a_worker_is_forgotten():
    """Of 1,000 lines, 100 take a second each and the others a tenth."""
    batch = wire.Batch(
        id="",
        endpoint="/v1/completions",
        input_file_id="",
        completion_window="24h",
        status="in_progress",
        created_at=1000,
        in_progress_at=1000,
        expires_at=10_000,
        request_counts=wire.RequestCounts(total=1000),
    )
    progress = BatchProgress(batch=batch, output_ttl_s=1)
    at, end_at = 1000.0, 1000 + 100 + 90
    for number in range(1, 1001):
        at += 1.0 if number <= 100 else 0.1
        counts = wire.RequestCounts(total=1000, completed=number)
        progress = batch_store.with_marks(replace(progress, batch=replace(batch, request_counts=counts)), at)
        if 50 <= number < 100:  # it cannot know yet
            assert estimate_end(progress, at) == pytest.approx(2000, abs=2)
        if number >= 410:
            assert estimate_end(progress, at) == pytest.approx(end_at, abs=2), number
