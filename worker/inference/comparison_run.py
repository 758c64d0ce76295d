"""The second stage of a compare job: wait for the base's result in Redis, score its tokens, compare.

The base's job was put on the base's queue together with this one. A compare job whose base has no result yet goes back
to its queue for a moment, so it holds no row and no lease, and the death of any process loses nothing.
"""

from msgspec.structs import replace
from redis import Redis
from rq.job import Retry
from rq.utils import as_text

from scorepool import wire
from scorepool.engine import ChatCodec
from scorepool.store import JobField, Keys, RqKeys
from scorepool.store.result_store import ResultMissing, ResultStore, ResultStoreError, object_path
from scorepool.wire import Floats
from scorepool.wire.stored_result import StoredResult, decode_recorded, read_object
from scorepool.worker.inference.compared import BaseSequence, compare_models, read_base, to_compared
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.summary import about, summary
from scorepool.worker.inference.text_lengths import Steps
from scorepool.worker.inference.tokenizing import SLICE_CHARACTERS
from scorepool.worker.rq.errors import JobError
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE

RETRY = Retry(max=10**9, interval=[1, 1, 2, 3, 5])  # seconds until the base's result is looked for again
ALIVE = ("queued", "started", "deferred", "scheduled", "created")  # RQ's names
READ_CHARACTERS = SLICE_CHARACTERS + 1  # reading waits for Redis and the result store, so it counts as a long text
MIN_LOGPROB = -9999.0


class BaseIsPending(Exception):
    """The base's job has not ended, or nobody can say: look again later."""


class ComparisonRun:
    """One compare job, once it was claimed by a worker of its model."""

    def __init__(self, request: wire.Compare, job_id: str, redis: Redis, results: ResultStore | None = None) -> None:
        self.request = request
        self.base_job_id = wire.base_job_id(job_id)
        self._redis = redis
        self._results = results
        self._stamp: wire.Provenance | None = None
        self._base: list[BaseSequence] = []
        self._vocab_size = 0

    def steps(self, vocab_size: int) -> Steps[list[PreparedSequence]]:
        """Read the base's result and return the sequences to score. Raises BaseIsPending, JobError."""
        yield READ_CHARACTERS
        self._vocab_size = vocab_size
        result = self._read()
        self._stamp = result.stamp
        self._base = read_base(self.request, result)
        return (yield from to_compared(self.request, self._base, vocab_size))

    def build(self, prepared: list[PreparedSequence], codec: ChatCodec, stamp: wire.Provenance) -> wire.Result:
        """Return the job's result."""
        assert self._stamp is not None
        comparison = compare_models(self._base, prepared, self._stamp, self.base_job_id, self._vocab_size)
        sequences = [_to_sequence_result(each, codec) for each in prepared]
        return wire.Result(
            sequences=sequences,
            comparison=comparison,
            temperature=self.request.temperature,
            logprobs_mode="raw_logprobs" if self.request.temperature == 1 else "processed_logprobs",
            usage=wire.Usage(
                prompt_tokens=sum(each.num_prompt_tokens for each in prepared),
                completion_tokens=comparison.num_tokens,
            ),
            stamp=stamp,
        )

    def _read(self) -> wire.Result:
        try:
            body = self._read_outcome()
        except REDIS_UNAVAILABLE:
            raise BaseIsPending from None
        if body is None:
            raise self._failed(wire.Failure(code="invalid", message="its job and its result are gone", field="base"))
        try:
            outcome = decode_recorded(body)
            if isinstance(outcome, StoredResult):
                return self._read_stored(outcome)
        except (wire.Invalid, ValueError, ResultMissing) as error:
            raise self._failed(wire.Failure(code="internal", message=f"its result cannot be read: {error}")) from None
        if isinstance(outcome, wire.Failure):
            raise self._failed(outcome)
        return outcome

    def _read_outcome(self) -> bytes | None:
        """Return what the base's job left. Raises BaseIsPending, RedisError."""
        body = self._redis.get(Keys.outcome(self.base_job_id))
        if body is None:
            status = as_text(self._redis.hget(RqKeys.job(self.base_job_id), JobField.STATUS) or b"")
            if status in ALIVE:
                raise BaseIsPending
            body = self._redis.get(Keys.outcome(self.base_job_id))  # it may have ended in between
        return body  # type: ignore[return-value]

    def _read_stored(self, stored: StoredResult) -> wire.Result:
        """Read the base's result from the result store. Raises BaseIsPending while the store does not answer."""
        path = object_path(self.base_job_id, stored.execution)
        if self._results is None:
            raise ResultMissing("it is in a result store, and this worker has no SCOREPOOL_RESULT_STORE")
        try:
            return read_object(self._results.get(path), path, stored.num_bytes)
        except ResultMissing:
            raise
        except ResultStoreError:
            raise BaseIsPending from None

    def _failed(self, failure: wire.Failure) -> JobError:
        message = f"base {self.request.base!r}, job {self.base_job_id}: {failure.message}"
        return JobError(replace(failure, message=message))


def _to_sequence_result(prepared: PreparedSequence, codec: ChatCodec) -> wire.SequenceResult:
    """Return the scored tokens, without the columns that served the comparison."""
    sequence, first = prepared.sequence, prepared.num_prompt_tokens
    token_ids, columns = sequence.token_ids[first:], sequence.columns
    nothing = [None] * (len(token_ids) - len(columns.logprobs))  # for a first token that has no distribution
    clamped = sum(value is not None and value < MIN_LOGPROB for value in columns.logprobs)
    logprobs = Floats(None if value is None else max(value, MIN_LOGPROB) for value in (*nothing, *columns.logprobs))
    fields = about(prepared, first) | summary(sequence, logprobs, 0)
    if nothing:
        fields["is_greedy"] = None
    return wire.SequenceResult(
        token_ids=token_ids,
        token_bytes=codec.tokenizer.bytes_of(token_ids),
        text=codec.tokenizer.decode(token_ids),
        logprobs=logprobs,
        ranks=[*nothing, *columns.ranks] if sequence.rank else None,
        clamped=clamped,
        **fields,  # type: ignore[arg-type]
    )
