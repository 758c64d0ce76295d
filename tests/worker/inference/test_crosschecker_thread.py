"""One worker's side of a crosscheck: what it computes, in which portions, and what it sends to whom."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace as replace_field

import pytest
from msgspec.structs import replace
from redis import Redis
from redis.exceptions import RedisError

from scorepool import wire
from scorepool.engine import ContextLengthExceeded, EngineDeadError, EngineError, NonFiniteLogits, Sequence
from scorepool.store import Keys
from scorepool.wire import Computation, Crosscheck, CrosscheckNotice, CrosscheckStatus, Floats
from scorepool.worker.inference import crosschecker
from scorepool.worker.inference.crosscheck_mail import CrosscheckMail
from scorepool.worker.inference.crosschecker import MAX_TOKENS, Crosschecker
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.rq.job import Job
from tests.worker.conftest import until
from tests.worker.fake import FakeEngine

STAMP = provenance_of("demo", FakeEngine.model_info)
RIGHT = [Floats([-0.5, -0.5]), Floats([-0.5])]
WRONG = [Floats([-0.5, -0.5]), Floats([-0.75])]
CHECK = Crosscheck(
    job_id="j",
    temperature=1.0,
    token_ids=[[1, 2, 3, 4], [5, 6, 7]],
    first=[2, 2],
    computations=[Computation(worker="a", stamp=STAMP, logprobs=RIGHT)],
)


class ImmediateEngine(FakeEngine):
    """An engine that computes at once, or fails with an error."""

    def __init__(self) -> None:
        self.groups: list[list[Sequence]] = []
        self.error: EngineError | None = None

    def add(self, sequences: list[Sequence], on_step: object = None) -> "Future[list[Sequence]]":
        future: Future[list[Sequence]] = Future()
        self.groups.append(sequences)
        if isinstance(self.error, NonFiniteLogits):
            future.set_exception(self.error)
        elif self.error is not None:
            raise self.error
        else:
            self._step_all(sequences)
            future.set_result(sequences)
        return future


class Side:
    """The thread of worker `me`, and what it told its worker."""

    def __init__(self, redis: Redis, max_batch_tokens: int = 2048) -> None:
        self.redis = redis
        self.engine = ImmediateEngine()
        self.shown: list[CrosscheckStatus] = []
        self.stops: list[str] = []
        self.failures: list[EngineDeadError] = []
        mail = CrosscheckMail(redis, "me")
        self.crosschecker = Crosschecker(
            self.engine, "demo", mail, 1.0, max_batch_tokens, self.shown.append, self._stop, self.failures.append
        )

    def _stop(self, reason: str) -> None:
        assert self.shown[-1].stopped is None, "shown before the worker stopped: it may get another job"
        self.stops.append(reason)

    def receive(self, *messages: wire.CrosscheckMessage, wait: bool = True) -> None:
        """Run the thread; wait until it has handled these messages."""
        if not self.shown:
            self.redis.rpush(Keys.crosscheck_inbox("me"), b"to an earlier worker of this name")
            self.crosschecker.start()
            until(lambda: not self.redis.exists(Keys.crosscheck_inbox("me")))
        self.redis.rpush(Keys.crosscheck_inbox("me"), *map(wire.encode, messages), wire.encode(FLAG))
        if wait:
            until(lambda: self.crosschecker.status.difference == "flag" or not self.crosschecker._thread.is_alive())

    def sent(self, worker: str) -> list[wire.CrosscheckMessage]:
        """Return the messages in the inbox of a worker."""
        packed = self.redis.lrange(Keys.crosscheck_inbox(worker), 0, -1)
        return [wire.parse(body, wire.CrosscheckMessage, "msgpack") for body in packed]  # type: ignore[arg-type]

    def counts(self) -> dict[bytes, bytes]:
        return self.redis.hgetall(Keys.crosscheck_counts)


FLAG = CrosscheckNotice(difference="flag")


def register(redis: Redis, *workers: str, **changes: object) -> None:
    """Write the cards of workers as live ones do."""
    for worker in workers:
        served = wire.ServedModel(
            id="demo",
            stamp=STAMP,
            context_length=64,
            vocab_size=258,
            self_test="passed",
            worker=worker,
            crosscheck=CrosscheckStatus(share=1.0),
        )
        redis.set(Keys.served_model(worker), wire.encode(replace(served, **changes)), ex=60)
        redis.zadd(Keys.models, {worker: 2e9})


@pytest.fixture
def make(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    monkeypatch.setattr(crosschecker, "POLL_S", 0.02)
    sides: list[Side] = []

    def make(max_batch_tokens: int = 2048) -> Side:
        register(redis, "me")
        sides.append(Side(redis, max_batch_tokens))
        return sides[-1]

    yield make
    for side in sides:
        side.crosschecker.close()


Make = Callable[..., Side]


def test_equal_results_are_counted_and_go_nowhere(redis: Redis, make: Make):
    register(redis, "a", "b")
    side = make()
    side.receive(CHECK)
    assert side.counts() == {b"agreed": b"1"}
    assert side.sent("a") + side.sent("b") == []


@pytest.mark.parametrize(
    "changes",
    [
        {"stamp": replace(STAMP, fingerprint="e")},
        {"stamp": replace(STAMP, dtype="bfloat16")},
        {"stamp": replace(STAMP, mode="exact")},
        {"crosscheck": None},
        {"crosscheck": CrosscheckStatus(share=1.0, stopped="it was wrong")},
    ],
)
def test_only_a_comparable_worker_that_takes_part_decides(redis: Redis, make: Make, changes: dict[str, object]):
    register(redis, "a")
    register(redis, "b", **changes)
    side = make()
    side.receive(replace(CHECK, computations=[Computation(worker="a", stamp=STAMP, logprobs=WRONG)]))
    assert side.sent("b") == []
    [notice] = side.sent("a")
    assert isinstance(notice, CrosscheckNotice)
    assert "workers a and me differ by up to 0.25 nats; no third worker can decide" in notice.difference


def test_a_third_worker_gets_both_results(redis: Redis, make: Make):
    register(redis, "a", "b")
    side = make()
    side.receive(replace(CHECK, computations=[Computation(worker="a", stamp=STAMP, logprobs=WRONG)]))
    [sent] = side.sent("b")
    assert isinstance(sent, Crosscheck)
    assert [(one.worker, one.logprobs) for one in sent.computations] == [("a", WRONG), ("me", RIGHT)]
    assert side.counts() == {b"differed": b"1"}


def test_nan_differs_from_every_number(redis: Redis, make: Make):
    register(redis, "a", "b")
    side = make()
    side.engine.error = NonFiniteLogits("the logits are NaN")
    side.receive(CHECK)
    [sent] = side.sent("b")
    assert isinstance(sent, Crosscheck)
    assert [column.values() for column in sent.computations[1].logprobs] == [[None, None], [None]]


def test_a_job_that_this_worker_cannot_compute_is_not_checked(redis: Redis, make: Make):
    register(redis, "a", "b")
    side = make()
    side.engine.error = ContextLengthExceeded("too long")
    side.receive(CHECK)
    assert (side.counts(), side.sent("a") + side.sent("b")) == ({}, [])


def test_a_dead_engine_is_reported_to_the_worker(redis: Redis, make: Make):
    side = make()
    side.engine.error = EngineDeadError("the engine failed")
    side.receive(CHECK)
    assert side.failures == [side.engine.error]


def test_a_check_of_weights_that_were_replaced_is_dropped(redis: Redis, make: Make):
    register(redis, "a", "b")
    side = make()
    side.engine.model_info = replace_field(FakeEngine.model_info, fingerprint="new weights")
    side.receive(replace(CHECK, computations=[Computation(worker="a", stamp=STAMP, logprobs=WRONG)]))
    assert (side.counts(), side.sent("a") + side.sent("b")) == ({}, [])


def test_a_long_job_runs_in_portions_of_one_step(make: Make):
    side = make(max_batch_tokens=10)
    lengths = [4, 4, 4, 30, 2, 2]
    ids = [list(range(length)) for length in lengths]
    right = [Floats([-0.5] * (length - 1)) for length in lengths]
    computations = [Computation(worker="a", stamp=STAMP, logprobs=right)]
    side.receive(Crosscheck(job_id="j", temperature=1.0, token_ids=ids, first=[1] * 6, computations=computations))
    portions = [[len(sequence.token_ids) for sequence in group] for group in side.engine.groups]
    assert portions == [[4, 4], [4], [30], [2, 2]]
    assert side.counts() == {b"agreed": b"1"}


@pytest.mark.parametrize("scope", [None, "alice\ns"])
def test_a_salted_job_is_checked_within_its_scope(redis: Redis, make: Make, scope: str | None):
    register(redis, "a")
    side = make()
    sequence = Sequence(token_ids=[1, 2], score_from=1, prefix_scope=scope)
    column = wire.SequenceResult(
        token_ids=[2], token_bytes=[b"a"], text="a", num_prompt_tokens=1, logprobs=Floats([-0.5])
    )
    usage = wire.Usage(prompt_tokens=1, completion_tokens=1)
    result = wire.Result(sequences=[column], temperature=1.0, usage=usage, stamp=STAMP)
    job = Job.create("f", connection=redis)
    side.crosschecker.offer(job, [PreparedSequence(sequence, 1, is_prompt_text=False, bos_added=False)], 1.0, result)
    assert job.on_recorded is not None
    job.on_recorded()
    side.receive(replace(CHECK, prefix_scope=scope))

    assert [each.prefix_scope for group in side.engine.groups for each in group] == [scope, scope]
    assert [check.prefix_scope for check in side.sent("a") if isinstance(check, Crosscheck)] == [scope]


def test_a_job_with_too_many_tokens_is_not_checked_and_its_result_is_not_kept(redis: Redis, make: Make):
    side = make()
    for num_tokens, is_checked in ((MAX_TOKENS, True), (MAX_TOKENS + 1, False)):
        job = Job.create("f", connection=redis)
        sequence = Sequence(token_ids=[1] * num_tokens, score_from=num_tokens - 1)
        prepared = [PreparedSequence(sequence, num_tokens - 1, is_prompt_text=False, bos_added=False)]
        column = wire.SequenceResult(
            token_ids=[1], token_bytes=[b"a"], text="a", num_prompt_tokens=num_tokens - 1, logprobs=Floats([-0.5])
        )
        usage = wire.Usage(prompt_tokens=num_tokens - 1, completion_tokens=1)
        result = wire.Result(sequences=[column], temperature=1.0, usage=usage, stamp=STAMP)
        side.crosschecker.offer(job, prepared, 1.0, result)
        assert (job.on_recorded is not None) == is_checked
        held = sys.getrefcount(result)
        job.on_recorded = None
        assert sys.getrefcount(result) == held


def test_an_inbox_that_is_not_emptied_expires_although_messages_arrive(redis: Redis):
    register(redis, "a")
    mail = CrosscheckMail(redis, "me")
    assert mail.send("a", FLAG)
    redis.expire(Keys.crosscheck_inbox("a"), 7)
    assert mail.send("a", FLAG)
    assert 0 < redis.ttl(Keys.crosscheck_inbox("a")) <= 7


def test_an_inbox_takes_no_more_bytes_than_its_share_of_redis(redis: Redis):
    register(redis, "a")
    inbox = Keys.crosscheck_inbox("a")
    redis.rpush(inbox, *["x" * 2**20] * 32)
    assert not CrosscheckMail(redis, "me").send("a", FLAG)
    redis.lpop(inbox, 2)
    assert CrosscheckMail(redis, "me").send("a", FLAG)


def test_a_difference_is_logged_although_redis_is_away(
    redis: Redis, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    side = make()

    def fail(*_: object) -> None:
        raise RedisError("Redis is away")

    monkeypatch.setattr(CrosscheckMail, "others", fail)
    side.receive(replace(CHECK, computations=[Computation(worker="a", stamp=STAMP, logprobs=WRONG)]), wait=False)
    until(lambda: "token 7: logprob -0.75 and -0.5" in caplog.text)
    until(lambda: side.counts() == {b"differed": b"1"})  # after the log


@pytest.mark.parametrize(("first", "second", "accused"), [(WRONG, RIGHT, "a"), (RIGHT, WRONG, "b")])
def test_the_outvoted_worker_computes_the_job_again(
    redis: Redis, make: Make, first: list[Floats], second: list[Floats], accused: str
):
    register(redis, "a", "b", "c")
    side = make()
    computations = [Computation(worker="a", stamp=STAMP, logprobs=first)]
    computations += [Computation(worker="b", stamp=STAMP, logprobs=second)]
    side.receive(replace(CHECK, computations=computations))
    [sent] = side.sent(accused)
    assert isinstance(sent, Crosscheck)
    assert [one.worker for one in sent.computations] == [accused, "b" if accused == "a" else "a", "me"]
    assert side.stops == []


def test_three_different_results_stop_nobody(redis: Redis, make: Make):
    register(redis, "a", "b", "c")
    side = make()
    other = [Floats([-0.5, -0.5]), Floats([-0.9])]
    computations = [Computation(worker="a", stamp=STAMP, logprobs=WRONG)]
    computations += [Computation(worker="b", stamp=STAMP, logprobs=other)]
    side.receive(replace(CHECK, computations=computations))
    for worker in "ab":
        [notice] = side.sent(worker)
        assert isinstance(notice, CrosscheckNotice)
        assert "no two of the workers a, b, me outvote the third" in notice.difference
    assert side.sent("c") == []


@pytest.mark.parametrize(
    ("accused", "others", "stops"),
    [("me", [WRONG, WRONG], 1), ("me", [RIGHT, WRONG], 0), ("me", [RIGHT, RIGHT], 0), ("x", [WRONG, WRONG], 0)],
)
def test_a_worker_stops_only_if_it_differs_again_from_both(
    redis: Redis, make: Make, accused: str, others: list[list[Floats]], stops: int
):
    register(redis, "a", "b")
    side = make()
    mine = Computation(worker=accused, stamp=STAMP, logprobs=[Floats([-9.0, -9.0]), Floats([-9.0])])
    computations = [mine]
    for name, logprobs in zip("ab", others, strict=True):
        computations.append(Computation(worker=name, stamp=STAMP, logprobs=logprobs))
    side.receive(replace(CHECK, computations=computations))
    assert len(side.stops) == stops
    assert side.counts() == ({b"stopped": b"1"} if stops else {})
    assert (side.shown[-1].stopped is not None) == bool(stops)


def test_a_worker_goes_on_if_one_of_the_two_that_agree_takes_no_more_jobs(redis: Redis, make: Make):
    register(redis, "a")
    register(redis, "b", crosscheck=CrosscheckStatus(share=1.0, stopped="it was wrong"))
    side = make()
    computations = [Computation(worker=name, stamp=STAMP, logprobs=WRONG) for name in ("me", "a", "b")]
    side.receive(replace(CHECK, computations=computations))
    assert side.stops == []
    assert "not both of them take jobs any more" in (side.shown[-2].difference or "")
