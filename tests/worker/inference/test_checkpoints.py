"""Finished rows in Redis equal what was computed, to the bit, and only the holder of the lease writes or reads them."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from msgspec.structs import replace
from redis import Redis

from scorepool import wire
from scorepool.engine import Classifier, Engine, EngineSettings, ModelInfo, Sampling, Sequence, Targets
from scorepool.store import JobField, Keys
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases, record_outcome
from scorepool.worker.inference.checkpoints.checkpoint_store import CheckpointStore
from scorepool.worker.inference.checkpoints.job_checkpoint import JobCheckpoint, decode_chunk, join_rows
from scorepool.worker.inference.checkpoints.rows import (
    fill_from_row,
    identity_digest,
    is_finished,
    may_be_kept,
    to_row,
)
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.result_cache.entry import copy_unbegun
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.translate import to_sequences
from scorepool.worker.rq.job import Job, Queue
from tests.engine.test_late_constraints import LateConstraint
from tests.tiny_models import TinyModels
from tests.worker.conftest import MODEL, submit, until
from tests.worker.fake import FakeEngine, finish

TOKENS = [5, 9, 3, 7, 11, 30, 41, 8]
INFO = FakeEngine.model_info
ITEMS = [wire.ScoreItem(prompt="a", completion="b")] * 2


@pytest.fixture(scope="module")
def engine(tiny_models: TinyModels) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(tiny_models("llama"))))
    yield engine
    engine.close()


def scored(**options: Any) -> Sequence:
    return Sequence(**{"token_ids": list(TOKENS), "score_from": 3} | options)


def finished(token: int = 1) -> Sequence:
    """Return a row as an engine leaves it."""
    sequence = Sequence(token_ids=[token, 2, 3], score_from=1)
    sequence.columns.logprobs = [-float(token), -0.5]
    sequence.num_computed = 2
    return sequence


def values(sequence: Sequence) -> dict[str, Any]:
    """Return what is computed of a sequence, in plain lists."""
    columns = dataclasses.asdict(sequence.columns)
    plain = {name: [list(row) if hasattr(row, "__iter__") else row for row in rows] for name, rows in columns.items()}
    names = ("token_ids", "text_bytes", "finish_reason", "stop_reason", "class_logits", "embedding", "num_cached")
    return plain | {name: getattr(sequence, name) for name in names}


@pytest.mark.parametrize(
    "sequence",
    [
        pytest.param(scored(), id="score"),
        pytest.param(scored(score_from=0, top_logprobs=3, rank=True, entropy=True, min_logprob=True), id="columns"),
        pytest.param(scored(targets=Targets([[1, 2, 3]], is_shared=True), temperature=0.7), id="targets"),
        pytest.param(
            Sequence(token_ids=list(TOKENS), sampling=Sampling(max_tokens=6, temperature=1.3, seed=4)), id="sampled"
        ),
        pytest.param(Sequence(token_ids=list(TOKENS), pooling="mean"), id="embedding"),
    ],
)
def test_a_row_equals_the_computed_one_to_the_bit(engine: Engine, sequence: Sequence):
    computed, again = copy_unbegun(sequence), copy_unbegun(sequence)
    engine.add([computed]).result(60)
    info = engine.model_info
    identity = identity_digest(info)
    assert is_finished(computed)
    [row] = decode_chunk(join_rows([wire.encode(to_row(7, identity, computed))]))
    assert row.index == 7
    assert fill_from_row(again, row, identity, info)
    assert values(again) == values(computed)
    assert again.is_done
    other = dataclasses.replace(info, weights_version=1)
    assert not fill_from_row(copy_unbegun(sequence), row, identity_digest(other), other)
    changed = copy_unbegun(sequence)
    changed.token_ids[0] += 1
    assert not fill_from_row(changed, row, identity, info)


def test_a_row_whose_grammar_failed_is_not_finished(engine: Engine):
    row = Sequence(token_ids=list(TOKENS), sampling=Sampling(max_tokens=6), constraint=LateConstraint(0, 1))
    engine.add([row]).result(60)
    assert is_finished(row)
    row.constraint.error = "the parser needs too much memory"
    assert not is_finished(row)


def test_a_classified_row_comes_back_with_its_logits():
    info = dataclasses.replace(INFO, classifier=Classifier(labels=("a", "b"), activation="softmax", pad_id=None))
    identity = identity_digest(info)
    computed = Sequence(token_ids=[1, 2], classify=True)
    computed.class_logits, computed.num_computed = [0.1, -2.5], 2
    row = to_row(0, identity, computed)
    again = copy_unbegun(computed)
    assert fill_from_row(again, row, identity, info)
    assert again.class_logits == [0.1, -2.5]
    wrong = replace(row, class_logits=[0.1])
    assert not fill_from_row(copy_unbegun(computed), wrong, identity, info)


def test_rows_that_do_not_fit_are_computed():
    identity = identity_digest(INFO)
    row = to_row(0, identity, finished())
    for wrong in ({"logprobs": wire.Floats([-1.0])}, {"embedding": b"1"}, {"class_logits": [1.0]}, {"digest": b""}):
        unbegun = copy_unbegun(finished())
        assert not fill_from_row(unbegun, replace(row, **wrong), identity, INFO)
        assert not unbegun.is_done
    assert decode_chunk(b"\xc1") == []
    assert decode_chunk(join_rows([wire.encode("a")])) == []


def test_every_flipped_bit_of_a_chunk_is_found():
    chunk = join_rows([wire.encode(to_row(0, identity_digest(INFO), finished()))])
    assert len(decode_chunk(chunk)) == 1
    for at in range(len(chunk)):
        damaged = bytearray(chunk)
        damaged[at] ^= 1
        assert decode_chunk(bytes(damaged)) == []


@pytest.mark.parametrize("wrong", [{"generated_ids": [10**9]}, {"generated_ids": [-1]}])
def test_a_row_with_unknown_tokens_is_computed(engine: Engine, wrong: dict[str, list[int]]):
    info = engine.model_info
    identity = identity_digest(info)
    computed = Sequence(token_ids=list(TOKENS), sampling=Sampling(max_tokens=1, temperature=0, ignore_eos=True))
    again = copy_unbegun(computed)
    engine.add([computed]).result(60)
    row = to_row(0, identity, computed)
    assert not fill_from_row(again, replace(row, **wrong), identity, info)
    assert fill_from_row(again, row, identity, info)


@pytest.mark.parametrize(
    ("request_", "is_kept"),
    [
        (wire.Score(model=MODEL, items=ITEMS), True),
        (wire.Score(model=MODEL, items=ITEMS[:1]), False),
        (wire.Classify(model=MODEL, items=[wire.ClassifyItem(prompt="a")] * 2), True),
        (wire.Embed(model=MODEL, items=[wire.EmbedItem(prompt="a")] * 2), True),
        (wire.Generate(model=MODEL, prompt="a", n=2), True),
        (wire.Generate(model=MODEL, prompt="a"), False),
        (wire.Generate(model=MODEL, prompt="a", n=2, stream=True), False),
        (wire.Generate(model=MODEL, prompt="a", n=2, recompute=True), False),
        (wire.Tokenize(model=MODEL, prompt="a"), False),
    ],
)
def test_jobs_of_several_rows_whose_tokens_nobody_has_seen_keep_rows(request_: wire.Request, is_kept: bool):
    assert may_be_kept(request_) is is_kept


class Run:
    """A job that a worker holds, and its checkpoint."""

    def __init__(self, redis: Redis, name: str = "mac", info: ModelInfo = INFO, **fields: object) -> None:
        self.redis = redis
        self.queue = Queue(MODEL, connection=redis)
        self.leases = Leases(redis, name, f"rq:worker:{name}", 60.0)
        if not redis.llen(self.queue.key):
            submit(redis, wire.Score(model=MODEL, items=ITEMS), fields={"owner": "alice", **fields})
        self.info = info
        [self.claimed] = self.claim()
        job = Job.from_claimed(self.claimed, redis, {})
        self.checkpoint = JobCheckpoint(job, lambda: self.info)

    def claim(self) -> list[ClaimedJob]:
        return self.leases.claim([self.queue], Claim(max_jobs=1, num_in_flight=0, max_in_flight=8)).jobs

    @property
    def key(self) -> str:
        return Keys.checkpoint(self.claimed.job_id)

    def put_back(self) -> None:
        assert self.leases.release([self.claimed]) == 1

    def restore(self, store: CheckpointStore, rows: dict[int, Sequence]) -> frozenset[int]:
        restored: Future[frozenset[int]] = Future()
        store.restore(self.checkpoint, rows, self.info, restored.set_result)
        return restored.result(60)


Open = Callable[..., CheckpointStore]


@pytest.fixture
def open_store(redis: Redis) -> Iterator[Open]:
    opened: list[CheckpointStore] = []

    def open_(every_s: float = 0.02, max_bytes: int = 2**20) -> CheckpointStore:
        opened.append(CheckpointStore(redis, every_s, max_bytes))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def unbegun(*tokens: int) -> dict[int, Sequence]:
    return {index: copy_unbegun(finished(token)) for index, token in enumerate(tokens)}


def keep(store: CheckpointStore, run: Run, *tokens: int) -> None:
    """Keep finished rows of a run, and one that is not finished."""
    run.checkpoint.rows = {index: finished(token) for index, token in enumerate(tokens)} | {99: unbegun(4)[0]}
    store.add(run.checkpoint)
    until(lambda: len(run.checkpoint.saved) == len(tokens), 10)
    store.remove(run.checkpoint)


def test_the_next_run_gets_the_rows_of_the_last_and_goes_on(redis: Redis, open_store: Open):
    store = open_store()
    first = Run(redis)
    assert not first.checkpoint.may_restore
    keep(store, first, 1, 2)
    assert 0 < redis.ttl(first.key) <= 86_400
    first.put_back()
    second = Run(redis, "other")
    assert second.checkpoint.may_restore
    rows = unbegun(1, 5, 3)  # the second asks for something else, the third was not finished
    assert second.restore(store, rows) == {0}
    assert rows[0].columns.logprobs == [-1.0, -0.5]
    assert [rows[index].is_done for index in (1, 2)] == [False, False]
    second.checkpoint.rows = {2: finished(3)}
    store.add(second.checkpoint)
    until(lambda: second.checkpoint.saved == {0, 2}, 10)
    second.put_back()
    third = Run(redis, "third")
    assert third.restore(store, unbegun(1, 5, 3)) == {0, 2}
    assert redis.hgetall(Keys.checkpoint_counts) == {b"saved": b"3", b"restored": b"3"}


def test_deaths_count_from_the_last_row_that_was_saved(redis: Redis, open_store: Open):
    store = open_store()
    deaths = []
    for saved in [(1,), (1, 2), (), ()]:
        run = Run(redis, **{JobField.MAX_CONCURRENCY: "1"})
        run.restore(store, unbegun(1, 2))
        if saved:
            keep(store, run, *saved)
        _, ended = Leases(redis, "other", "rq:worker:other", 60.0).reclaim([run.queue], 3, [run.claimed.lease_key])
        deaths.append((redis.hget(f"rq:job:{run.claimed.job_id}", JobField.CRASHES), len(ended)))
    assert deaths == [(b"1", 0), (b"1", 0), (b"2", 0), (b"3", 1)]


def test_workers_of_two_weights_that_save_the_same_rows_in_turns_get_no_further(redis: Redis, open_store: Open):
    """Each drops the rows of the other, so that its death counts though it has saved rows."""
    store = open_store()
    deaths = []
    for version in (1, 2, 1):
        info = dataclasses.replace(INFO, weights_version=version)
        run = Run(redis, info=info, **{JobField.MAX_CONCURRENCY: "1"})
        run.restore(store, unbegun(1, 2, 3))
        keep(store, run, 1, 2)
        _, ended = Leases(redis, "other", "rq:worker:other", 60.0).reclaim([run.queue], 3, [run.claimed.lease_key])
        deaths.append((redis.hget(f"rq:job:{run.claimed.job_id}", JobField.CRASHES), len(ended)))
    assert deaths == [(b"1", 0), (b"2", 0), (b"3", 1)]


def test_rows_of_other_weights_are_dropped(redis: Redis, open_store: Open):
    store = open_store()
    first = Run(redis)
    keep(store, first, 1, 2)
    first.put_back()
    second = Run(redis, info=dataclasses.replace(INFO, weights_version=2))
    assert second.restore(store, unbegun(1, 2)) == frozenset()
    assert not redis.exists(first.key)
    assert not redis.hexists(f"rq:job:{first.claimed.job_id}", JobField.CHECKPOINT)
    assert redis.hgetall(Keys.checkpoint_counts)[b"dropped"] == b"2"


def test_rows_that_were_kept_before_the_weights_changed_are_kept_anew(redis: Redis, open_store: Open):
    store = open_store()
    run = Run(redis)
    keep(store, run, 1, 2)
    run.info = dataclasses.replace(INFO, weights_version=2)
    run.checkpoint.rows = {0: finished(1)}
    store.add(run.checkpoint)
    until(lambda: run.checkpoint.saved == {0}, 10)
    store.remove(run.checkpoint)
    assert redis.hget(run.key, "identity") == identity_digest(run.info)
    run.put_back()
    assert Run(redis, info=run.info).restore(store, unbegun(1, 2)) == {0}


def test_a_worker_that_lost_the_lease_neither_writes_nor_reads_nor_drops(redis: Redis, open_store: Open):
    store = open_store()
    zombie = Run(redis)
    keep(store, zombie, 1)
    zombie.put_back()
    holder = Run(redis, "other")
    before = redis.hgetall(zombie.key)
    zombie.checkpoint.rows = {0: finished(1), 1: finished(2)}
    store.add(zombie.checkpoint)
    until(lambda: zombie.checkpoint.is_stopped, 10)
    zombie.checkpoint.may_restore = True
    zombie.info = dataclasses.replace(INFO, weights_version=2)
    assert zombie.restore(store, unbegun(1)) == zombie.checkpoint.saved == {0}  # what it had saved, nothing is read
    assert redis.hgetall(zombie.key) == before
    assert holder.restore(store, unbegun(1)) == {0}


def test_the_end_of_a_job_deletes_its_rows_and_nothing_is_written_after_it(redis: Redis, open_store: Open):
    store = open_store()
    run = Run(redis)
    keep(store, run, 1)
    with redis.pipeline() as pipeline:
        record_outcome(
            pipeline, run.claimed.job_id, wire.encode(wire.Failure(code="expired", message="late")), 60, False
        )
        pipeline.zrem(run.checkpoint.registry_key, run.claimed.lease_key)
        pipeline.execute()
    assert not redis.exists(run.key)
    run.checkpoint.rows = {1: finished(2)}
    store.add(run.checkpoint)
    until(lambda: run.checkpoint.is_stopped, 10)
    assert not redis.exists(run.key)


def test_the_bytes_of_a_job_and_of_its_owners_account_bound_its_rows(redis: Redis, open_store: Open):
    for max_bytes, counted in ((100, 0), (2**20, 2100)):
        redis.flushdb()
        run = Run(redis)
        if counted:
            redis.hset(Keys.sizes_of("alice"), mapping={run.claimed.job_id: counted, "total": counted})
        run.checkpoint.rows = {0: finished(1), 1: finished(2)}
        store = open_store(max_bytes=max_bytes)
        store.add(run.checkpoint)
        until(lambda run=run: run.checkpoint.is_stopped, 10)
        assert not redis.exists(run.key)


def test_rows_that_redis_has_lost_are_written_again(redis: Redis, open_store: Open):
    store = open_store()
    run = Run(redis)
    keep(store, run, 1)
    redis.delete(run.key)
    keep(store, run, 1, 2)
    until(lambda: redis.hget(f"rq:job:{run.claimed.job_id}", JobField.CHECKPOINT) == b"2", 10)
    run.put_back()
    assert Run(redis).restore(store, unbegun(1, 2)) == {0, 1}


def test_hostile_values_cost_only_the_rows(redis: Redis, open_store: Open):
    store = open_store()
    run = Run(redis)
    keep(store, run, 1)
    run.put_back()
    identity = identity_digest(INFO)
    for hostile in (b"\xc1", b"\xdd\xff\xff\xff\xff", join_rows([wire.encode(1)]), b"", b"x" * 5_000_000):
        redis.hset(run.key, mapping={"identity": identity, "0": hostile})
        again = Run(redis)
        assert again.restore(store, unbegun(1)) == frozenset()
        again.put_back()
    redis.delete(run.key)
    redis.set(run.key, "wrong type")
    again = Run(redis)
    assert again.restore(store, unbegun(1)) == frozenset()
    keep(store, again, 1)


def test_a_short_job_writes_nothing(redis: Redis, open_store: Open):
    store = open_store(every_s=5.0)
    run = Run(redis)
    run.checkpoint.rows = {0: finished(1)}
    commands = redis.info("stats")["total_commands_processed"]
    store.add(run.checkpoint)
    store.remove(run.checkpoint)
    assert redis.info("stats")["total_commands_processed"] == commands + 1  # this one
    assert not redis.exists(run.key)


class InstantEngine(FakeEngine):
    """An engine that computes what it gets at once, with the weights of `computed_by`."""

    def __init__(self) -> None:
        super().__init__()
        self.computed_by = self.model_info
        self.numbers: list[int] = []  # of the sequences of each group

    def add(self, sequences: list[Sequence], on_step: object = None) -> "Future[list[Sequence]]":
        self.numbers.append(len(sequences))
        for sequence in sequences:
            sequence.columns.logprobs = [-0.5] * (len(sequence.token_ids) - (sequence.score_from or 0))
            sequence.num_computed, sequence.model_info = len(sequence.token_ids), self.computed_by
        self.model_info = self.computed_by
        future: Future[list[Sequence]] = Future()
        future.set_result(sequences)
        return future


@pytest.mark.parametrize(("version", "numbers"), [(0, [2]), (1, [2, 3])])
def test_a_result_has_restored_rows_unless_other_weights_computed_the_rest(
    redis: Redis, open_store: Open, version: int, numbers: list[int]
):
    store = open_store()
    engine = InstantEngine()
    runner = InferenceRunner(engine, MODEL, TokenPublisher(redis), checkpoints=store)
    items = [wire.ScoreItem(prompt="a", completion=text) for text in ("x", "y", "z")]
    submit(redis, wire.Score(model=MODEL, items=items))
    first = Run(redis)
    request = wire.decode_request(first.claimed.request or b"")
    prepared = finish(to_sequences(request, engine.chat, 99))
    first.checkpoint.rows = {1: prepared[1].sequence}
    prepared[1].sequence.columns.logprobs, prepared[1].sequence.num_computed = [-0.25], 2
    store.add(first.checkpoint)
    until(lambda: first.checkpoint.saved == {1}, 10)
    store.remove(first.checkpoint)
    first.put_back()

    engine.computed_by = dataclasses.replace(INFO, weights_version=version)
    pending = runner(Job.from_claimed(Run(redis, "other").claimed, redis, {}))
    result = pending.finish(pending.future.result(60))
    assert [list(each.logprobs or ()) for each in result.sequences] == [[-0.5], [-0.5 if version else -0.25], [-0.5]]
    assert engine.numbers == numbers
    assert result.stamp.weights_version == version
    assert result.stamp.cached_items == 0
    runner.close()


class Offered:
    """A crosschecker that keeps what it is offered."""

    scopes: tuple[str | None, ...] = ()

    def offer(self, job: Job, prepared: list[PreparedSequence], temperature: float, result: wire.Result) -> None:
        self.scopes = tuple(each.sequence.prefix_scope for each in prepared)


def test_restored_rows_are_checked_within_the_salt_of_their_job(redis: Redis, open_store: Open):
    """Nothing computes them here, so that only their job's own setting gives them a scope."""
    store, engine, crosschecker = open_store(), InstantEngine(), cast(Crosschecker, Offered())
    runner = InferenceRunner(engine, MODEL, TokenPublisher(redis), crosschecker, checkpoints=store)
    submit(
        redis,
        wire.Score(
            model=MODEL, cache_salt="s", items=[wire.ScoreItem(prompt="a", completion=text) for text in ("x", "y")]
        ),
    )
    first = Run(redis)
    prepared = finish(to_sequences(wire.decode_request(first.claimed.request or b""), engine.chat, 99))
    first.checkpoint.rows = {0: prepared[0].sequence}
    prepared[0].sequence.columns.logprobs, prepared[0].sequence.num_computed = [-0.25], 2
    store.add(first.checkpoint)
    until(lambda: first.checkpoint.saved == {0}, 10)
    store.remove(first.checkpoint)
    first.put_back()

    pending = runner(Job.from_claimed(Run(redis, "other").claimed, redis, {}))
    pending.finish(pending.future.result(60))
    assert engine.numbers == [1]
    assert len(crosschecker.scopes) == 2
    assert len(set(crosschecker.scopes)) == 1
    assert crosschecker.scopes[0] is not None
    runner.close()


TEXTS = [[5, 9, 3, 7], [11, 30, 41], [8, 7, 6, 5, 4]]
KINDS = [
    pytest.param(
        wire.Score(
            model=MODEL,
            items=[wire.ScoreItem(prompt=text[:1], completion=text[1:]) for text in TEXTS],
            score="all",
            top_logprobs=2,
            rank=True,
            entropy=True,
            targets=[3, 4],
            temperature=0.7,
        ),
        id="score",
    ),
    pytest.param(
        wire.Score(
            model=MODEL, items=[wire.ScoreItem(prompt=text[:1], completion=text[1:]) for text in TEXTS], packed=True
        ),
        id="packed",
    ),
    pytest.param(
        wire.Embed(model=MODEL, items=[wire.EmbedItem(prompt=text) for text in TEXTS], pooling="mean"), id="embed"
    ),
    pytest.param(
        wire.Generate(model=MODEL, prompt=[5, 6, 7], n=3, max_tokens=9, top_logprobs=2, stop_token_ids=[40, 41, 42]),
        id="n",
    ),
]


@pytest.fixture(scope="module")
def exact_engine(tiny_models: TinyModels) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(tiny_models("llama")), mode="exact"))
    yield engine
    engine.close()


@pytest.mark.parametrize("request_", KINDS)
@pytest.mark.parametrize("num_saved", [1, 3])
def test_a_result_from_rows_of_two_runs_is_that_of_one_run_to_the_bit_in_exact_mode(
    redis: Redis, exact_engine: Engine, open_store: Open, request_: wire.Request, num_saved: int
):
    store, engine = open_store(), exact_engine
    submit(redis, request_)
    first = Run(redis, info=engine.model_info)
    without = InferenceRunner(engine, MODEL, TokenPublisher(redis))  # what it saves is decided below
    pending = without(Job.from_claimed(first.claimed, redis, {}))
    prepared = pending.future.result(60)
    undisturbed = pending.finish(prepared)
    without.close()
    first.checkpoint.rows = {index: each.sequence for index, each in enumerate(prepared[:num_saved])}
    store.add(first.checkpoint)
    until(lambda: len(first.checkpoint.saved) == num_saved, 10)
    store.remove(first.checkpoint)
    first.put_back()

    second = Run(redis, "other", engine.model_info)
    runner = InferenceRunner(engine, MODEL, TokenPublisher(redis), checkpoints=store)
    computed_before = engine.stats.prompt_tokens
    pending = runner(Job.from_claimed(second.claimed, redis, {}))
    resumed = pending.finish(pending.future.result(60))
    assert (engine.stats.prompt_tokens == computed_before) is (num_saved == 3)
    usage = replace(resumed.usage, cached_tokens=undisturbed.usage.cached_tokens)  # which rows found a prefix
    assert wire.encode(replace(resumed, usage=usage)) == wire.encode(undisturbed)
    runner.close()
