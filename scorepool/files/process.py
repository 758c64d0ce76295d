"""Work on a file: rows in, jobs, rows out, in bounded memory of this process and of the server."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, Protocol

import httpx
from msgspec import Struct

from scorepool import wire
from scorepool.files.errors import BadInput, ServerError
from scorepool.files.formats.registry import Source
from scorepool.files.output.divergences import Divergence
from scorepool.files.output.journal import Counts
from scorepool.files.output.means import Mean
from scorepool.files.rows import Done, DoneRows, Row, Values
from scorepool.files.scoring.tasks import Task
from scorepool.files.window import chunk_rows, in_order
from scorepool.sdk import AsyncClient, InvalidUrl, NotScorepool, ScorepoolError, Unreachable

MAX_BAD_HEAD = 1000  # rows at the start of a file of which one must be readable
CHECK_WORKERS_EVERY_S = 10.0
LAST_DELETION_S = 30.0  # after the last row: a restart of the server takes less

logger = logging.getLogger("scorepool")


class Estimate(Struct, frozen=True, kw_only=True):
    """What the work on a file would take. `num_tokens` of the summary is extrapolated from the sample."""

    num_sampled: int  # rows whose tokens were counted
    num_unfit: int  # of these, such as one that is too long
    first_reason: str  # why the first bad row cannot be done; empty: there is none
    max_new_tokens: int  # of each row, which `num_tokens` counts in full
    tokens_per_s: float | None  # of all models' workers in their last jobs; None: one has ended no job yet
    duration_s: float | None


class Summary(Struct, frozen=True, kw_only=True):
    """What was done with a file, or would be with `dry_run`."""

    num_rows: int
    num_failed: int  # rows, which OUT.errors.jsonl names
    num_tokens: int
    models: list[str]
    means: dict[str, Mean] = {}  # of new columns, over the rows that did not fail and have a value
    divergences: dict[str, Divergence] = {}  # of `compare_file`: of each model from the first one
    stamp_differences: list[str]  # between results of this process: empty if one model and software computed them all
    estimate: Estimate | None = None  # of a dry run alone


class Output(Protocol):
    """Where rows go."""

    @property
    def run_id(self) -> str: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def digest(self) -> str: ...
    @digest.setter
    def digest(self, digest: str) -> None: ...
    def write(self, rows: Sequence[Done]) -> None: ...
    def is_due(self) -> bool: ...
    def save(self) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...
    @property
    def undeleted(self) -> list[str]: ...
    @property
    def is_complete(self) -> bool: ...


Report = Callable[[Counts], None]


def first_row(source: Source) -> tuple[Values, Iterator[Row]]:
    """Return the values of the first row that can be read, and all rows. Raises BadInput if there is none."""
    head: list[Row] = []
    for row in source.rows:
        head.append(row)
        if row.values is not None:
            return row.values, chain(head, source.rows)
        if len(head) == MAX_BAD_HEAD:
            break
    if not head:
        raise BadInput(f"{source.name} has no rows")
    raise BadInput(f"{source.name} has no row that can be read: line {head[0].line}: {head[0].reason}")


class Model(NamedTuple):
    """A model that is served."""

    name: str
    context_length: int  # tokens, the shortest of its workers
    weights: str  # as stamps name them, or of each of several workers
    tokens_per_s: float | None  # of its workers in their last jobs; None: one has ended no job yet
    vocabulary: str | None = None  # digest of its tokens, None if not all workers have one
    vocab_size: int = 0

    def has_tokens_of(self, other: "Model") -> bool:
        """True if both divide text into the same tokens."""
        return (self.vocabulary, self.vocab_size) == (other.vocabulary, other.vocab_size) and bool(self.vocabulary)


async def choose_models(url: str, api_key: str, names: Sequence[str]) -> list[Model]:
    """Return the models of these names, by default the only one that is served. Raises BadInput, ServerError."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):  # as HTTP headers are
        raise BadInput("the API key has characters that no key has: expected what `scorepool key` prints")
    try:
        async with AsyncClient(url, api_key, retry_s=0.0) as client:
            models = await client.models()
    except InvalidUrl as error:
        raise BadInput(str(error)) from None
    except Unreachable:
        raise ServerError(
            f"no server answers at {url}: start one with `scorepool serve`, name yours with --url or SCOREPOOL_URL, or "
            "give the model's folder with --local to run one for this command"
        ) from None
    except ScorepoolError as error:
        if error.status == httpx.codes.UNAUTHORIZED:
            raise ServerError(f"{url}: {error.message}; give one by SCOREPOOL_API_KEY or --api-key") from None
        raise ServerError(str(error)) from None
    except NotScorepool as error:
        raise ServerError(str(error)) from None
    workers: dict[str, list[wire.ServedModel]] = {}
    for served in models:
        for name in served.names:
            workers.setdefault(name, []).append(served)
    ids = {served.id for served in models}
    chosen = names or (list(ids) if len(ids) == 1 else [])
    missing = [name for name in chosen if name not in workers]
    if missing or not chosen:
        problem = f"no worker serves {missing[0]!r}" if missing else "no --model is given"
        raise BadInput(f"{problem}: the server at {url} has {', '.join(sorted(workers)) or 'no model yet'}")
    return [_describe(name, workers[name]) for name in chosen]


def _describe(name: str, workers: Sequence[wire.ServedModel]) -> Model:
    speeds = [worker.link.tokens_per_s if worker.link else None for worker in workers]
    known = [speed for speed in speeds if speed]
    return Model(
        name,
        min(worker.context_length for worker in workers),
        ", ".join(sorted({worker.stamp_of(name).weights for worker in workers})),
        sum(known) if len(known) == len(speeds) else None,
        workers[0].vocabulary if len({(worker.vocabulary, worker.vocab_size) for worker in workers}) == 1 else None,
        workers[0].vocab_size,
    )


async def process_rows(
    rows: Iterator[Row],
    task: Task,
    output: Output,
    client: AsyncClient,
    *,
    models: Sequence[Model],
    rows_per_chunk: int,
    max_in_flight: int,
    report: Report,
) -> list[str]:
    """Work on the rows that the output has not; return how the stamps of the results differ.

    Jobs are deleted on the server when their rows are on the disk. Raises FileError.
    """
    left = RowsLeft(rows, output.counts.num_rows, output.digest)
    stamps = Stamps(models)
    computed = Computed(output.counts, report)
    done_chunks = in_order(
        computed.note_places(chunk_rows(left, rows_per_chunk)), lambda rows: computed.run(task, rows), max_in_flight
    )
    watch = asyncio.create_task(warn_without_workers(client, [model.name for model in models]))
    try:
        await delete_jobs(client, output.undeleted)  # of an earlier process
        report(output.counts)
        async for done in done_chunks:
            stamps.add(done)
            output.write(done.rows)
            output.digest = left.digest_at(done.rows[-1].row.number)
            computed.forget(done)
            output.undeleted.extend(done.job_ids)
            if output.is_due():
                output.save()
                await delete_jobs(client, output.undeleted)
    except (Unreachable, ScorepoolError, NotScorepool) as error:
        raise ServerError(f"{error}; what was done is kept, and the same command goes on") from error
    finally:
        watch.cancel()
        await done_chunks.aclose()
        output.save()
    with suppress(Unreachable, NotScorepool, TimeoutError):  # every row is done: the server deletes the jobs later
        async with asyncio.timeout(LAST_DELETION_S):
            await delete_jobs(client, output.undeleted)
    return stamps.differences


async def warn_without_workers(client: AsyncClient, names: Sequence[str]) -> None:
    """Warn each time that a model's last worker has left: its jobs wait, and nothing else says so. Never returns."""
    absent: set[str] = set()
    while True:
        await asyncio.sleep(CHECK_WORKERS_EVERY_S)
        with suppress(Unreachable, ScorepoolError, NotScorepool):
            served = {name for model in await client.models() for name in model.names}
            for name in sorted({*names} - served - absent):
                logger.warning("no worker serves %s now: its rows wait for one, which may be started at any time", name)
            absent = {*names} - served


class RowsLeft:
    """The rows that an output has not. Those that it has are read again, and must be the same."""

    def __init__(self, rows: Iterator[Row], num_done: int, digest: str) -> None:
        """`digest` is that of the rows that are done."""
        self._rows, self._num_done, self._digest = rows, num_done, digest
        self._digests: dict[int, str] = {}  # of all rows up to each one that is not written yet

    def __iter__(self) -> Iterator[Row]:
        """Yield rows. Raises BadInput."""
        digest, num_rows = "", 0
        for num_rows, row in enumerate(self._rows, 1):
            if num_rows == self._num_done + 1:
                self._check(digest)
            digest = row.digest_after(digest)
            if num_rows > self._num_done:
                self._digests[row.number] = digest
                yield row
        if num_rows <= self._num_done:
            self._check(digest)

    def _check(self, digest: str) -> None:
        if digest != self._digest:
            raise BadInput(
                f"the first {self._num_done:,} rows of FILE are not those that OUT was begun with: give the same FILE, "
                "another -o, or remove OUT.journal to begin again"  # --overwrite goes on after the same command
            )

    def digest_at(self, number: int) -> str:
        """Return the digest of all rows up to one, and forget those before it."""
        for before in [each for each in self._digests if each < number]:
            del self._digests[before]
        return self._digests.pop(number)


class Computed:
    """What is done and what is computed beyond it: a chunk may have to wait for one before it. Without these the speed
    would come in bursts, and so would the time left."""

    def __init__(self, counts: Counts, report: Report) -> None:
        self._counts, self._report = counts, report
        self._places: dict[int, int] = {}  # bytes of the input before each chunk, by the number of its first row
        self._ahead: dict[int, Counts] = {}  # of each chunk that waits

    def note_places(self, chunks: Iterator[list[Row]]) -> Iterator[list[Row]]:
        """Yield the chunks."""
        position = self._counts.position
        for chunk in chunks:
            self._places[chunk[0].number] = position
            position = chunk[-1].position
            yield chunk

    async def run(self, task: Task, rows: list[Row]) -> DoneRows:
        """Run a task on a chunk, and report what is computed then."""
        done = await task.run(rows)
        num_tokens = sum(each.num_tokens for each in done.rows)
        num_bytes = rows[-1].position - self._places.pop(rows[0].number)
        self._ahead[rows[0].number] = Counts(len(rows), 0, num_tokens, num_bytes)
        parts = [self._counts, *self._ahead.values()]
        self._report(
            Counts(
                sum(each.num_rows for each in parts),
                self._counts.num_failed,
                sum(each.num_tokens for each in parts),
                sum(each.position for each in parts),
            )
        )
        return done

    def forget(self, done: DoneRows) -> None:
        """Take note that a chunk is written, and so in the counts."""
        del self._ahead[done.rows[0].row.number]


class Stamps:
    """What computed the results, and how that changed."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._weights = {model.name: model.weights for model in models}
        self._first: dict[str, wire.Provenance] = {}  # by model
        self.differences: list[str] = []

    def add(self, done: DoneRows) -> None:
        """Take the stamps of rows. Raises ServerError if the weights are not those that OUT was begun with."""
        for model, stamp in done.stamps:
            if stamp.weights not in self._weights[model].split(", "):
                raise ServerError(
                    f"the weights of {model} were changed while the command worked: fingerprint {stamp.weights!r}, "
                    f"expected {self._weights[model]!r}; serve those again, or begin again with --overwrite"
                )
            first = self._first.setdefault(model, stamp)
            self.differences = self.differences or list(wire.stamp_differences(first, stamp))


async def delete_jobs(client: AsyncClient, job_ids: list[str]) -> None:
    """Delete jobs, and take them off the list. One that is gone does no harm."""
    await asyncio.gather(*(_delete(client, job_id) for job_id in job_ids))
    job_ids.clear()


async def _delete(client: AsyncClient, job_id: str) -> None:
    with suppress(ScorepoolError):
        await client.delete(job_id)
