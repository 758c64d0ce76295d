"""How far the work is while rows wait for rows before them, and what ends it."""

import asyncio
import logging
from typing import Any, cast

import pytest

from scorepool import wire
from scorepool.files import process
from scorepool.files.errors import BadInput
from scorepool.files.output.journal import Counts
from scorepool.files.process import Computed, RowsLeft
from scorepool.files.rows import Done, DoneRows, Row
from scorepool.files.scoring.jobs import fault_of, run_job
from scorepool.files.window import chunk_rows, in_order
from scorepool.sdk import AsyncClient


def test_rows_that_wait_for_rows_before_them_count_as_computed():
    reported: list[tuple[int, int, int]] = []
    counts = Counts(position=100)
    computed = Computed(counts, lambda each: reported.append((each.num_rows, each.num_tokens, each.position)))
    second_is_done = asyncio.Event()

    class Task:
        async def run(self, rows: list[Row]) -> DoneRows:
            if rows[0].number == 1:
                await second_is_done.wait()
            second_is_done.set()
            return DoneRows([Done(row, {}, num_tokens=5) for row in rows])

    async def work() -> None:
        rows = (Row(number, number, 100 + 10 * number, {"a": "x"}) for number in range(1, 4))
        chunks = computed.note_places(chunk_rows(rows, 2))
        async for done in in_order(chunks, lambda rows: computed.run(Task(), rows), 2):
            counts.add(done.rows, set())
            computed.forget(done)

    asyncio.run(work())
    assert reported == [(1, 5, 110), (3, 15, 130)]
    assert counts.position == 130


def test_a_refusal_of_an_option_ends_the_work_and_one_of_a_row_does_not():
    refusals = [("top_p", True), ("messages[0].role", True), (None, True), (None, False)]
    faults = [fault_of("refused", field, may_be_of_a_row) for field, may_be_of_a_row in refusals]
    assert [getattr(fault, "exit_status", "of a row") for fault in faults] == [2, "of a row", "of a row", 3]


@pytest.mark.parametrize(
    "request_type", [wire.Score, wire.Compare, wire.Generate, wire.Tokenize], ids=lambda each: each.__name__
)
def test_a_slow_job_has_the_longest_time_that_the_server_gives(request_type: Any):
    fields = {wire.Score: {"items": []}, wire.Compare: {"items": [], "base": "b"}}.get(request_type, {"prompt": "a"})
    submitted: list[wire.Request] = []

    class Client:
        async def submit(self, request: wire.Request, **_: object) -> None:
            submitted.append(request)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(run_job(cast("AsyncClient", Client()), request_type(model="m", **fields), "key", DoneRows([])))
    assert submitted == [request_type(model="m", timeout_s=86_400, **fields)]


def test_a_model_without_a_worker_is_named_once(
    two_models_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "CHECK_WORKERS_EVERY_S", 0.02)

    async def watch() -> None:
        async with AsyncClient(two_models_url) as client:
            await asyncio.wait_for(process.warn_without_workers(client, ["demo", "absent"]), 3.0)

    with caplog.at_level(logging.WARNING, "scorepool"), pytest.raises(TimeoutError):
        asyncio.run(watch())
    [record] = caplog.records
    assert record.getMessage().startswith("no worker serves absent now: its rows wait for one")


def rows_of(*texts: str) -> list[Row]:
    return [Row(number, number, number, {"text": text}) for number, text in enumerate(texts, 1)]


@pytest.mark.parametrize("texts", [("a", "b", "c"), ("a", "b")])
def test_rows_that_are_done_are_left_out_if_they_are_the_same(texts: tuple[str, ...]):
    first = RowsLeft(iter(rows_of("a", "b")), 0, "")
    assert len(list(first)) == 2
    digest = first.digest_at(2)
    left = RowsLeft(iter(rows_of(*texts)), 2, digest)
    assert [row.values for row in left] == [{"text": text} for text in texts[2:]]
    if texts[2:]:
        assert left.digest_at(3) != digest


@pytest.mark.parametrize("texts", [("a", "x", "c"), ("x", "b"), ("a",), ()])
def test_the_work_does_not_go_on_with_other_rows(texts: tuple[str, ...]):
    first = RowsLeft(iter(rows_of("a", "b")), 0, "")
    list(first)
    with pytest.raises(BadInput, match="the first 2 rows of FILE are not those"):
        list(RowsLeft(iter(rows_of(*texts)), 2, first.digest_at(2)))
