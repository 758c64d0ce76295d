"""The job function store.INFER: run one wire.Request on the engine.

main thread        InferenceRunner(job)                            to_result, if small ──► wire.Result
                         │                                                       ▲
tokenizer threads        └──► InferenceRun.advance: to_sequences ──► engine.add  │
grammars' thread                     (a constraint is compiled first) ──┘ │      │
engine's thread                                                           └──► _on_done ──► ended
results' thread                                             to_result, if large ──┘
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock

from msgspec.structs import replace
from redis import Redis
from rq.job import Retry

from scorepool import wire
from scorepool.engine import Engine, EngineError, InvalidRequest, ModelInfo, Sequence, Share, WeightsReplaced
from scorepool.store import JobField
from scorepool.worker.inference.comparison_run import RETRY, BaseIsPending, ComparisonRun
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.job_progress import JobProgress
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.owner_turns import OwnerThread
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of, with_cached
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.result_cache.digest import may_be_cached
from scorepool.worker.inference.result_cache.result_cache import CachedGroup, ResultCache
from scorepool.worker.inference.structured_outputs import invalid_grammar
from scorepool.worker.inference.text_lengths import invalid_request
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.tokenizing import TokenizingQueue
from scorepool.worker.inference.translate import num_characters, to_sequences, with_seed
from scorepool.worker.rq.errors import JobError, Postponed
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job

WEIGHTS_RETRY_S = 5  # after which a job looks again whether the weights that it waits for serve
LARGE_RESULT = 65_536  # numbers of a result that takes 0.05 s to build
BuildResult = Callable[[wire.Request, list[PreparedSequence]], wire.Result]


class InferenceRunner:
    """The job function. The main thread calls it. Tokenizing a long text takes seconds, so it has its own threads.

    So has the building of a large result.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        publisher: TokenPublisher,
        crosschecker: Crosschecker | None = None,
        cache: ResultCache | None = None,
        redis: Redis | None = None,
    ) -> None:
        self.redis = redis  # of compare jobs, which read their base's result
        self.engine = engine
        self.cache = cache
        self.model = model
        self.publisher = publisher
        self.crosschecker = crosschecker
        self.tokenizing = TokenizingQueue()
        self.large_results = OwnerThread("results")

    def __call__(self, job: Job) -> AsyncResult:
        """Start the job. Raises wire.Invalid, JobError."""
        if job.request is None:
            raise JobError(
                wire.Failure(
                    code="internal",
                    message="the job's request is no longer in Redis; submit it again as a new job",
                )
            )
        request = with_seed(wire.decode_request(job.request), job.id)
        request = wire.with_top_k(request, self.engine.model_info.vocab_size)
        if isinstance(request, wire.Generate) and request.include_draft_logprobs:
            check_speculates(self.engine.model_info)
        check_version(request.if_weights, self.engine.model_info)
        job.request = None  # it may be large, and Redis has it
        comparison, build = None, self._build
        if isinstance(request, wire.Compare) and self.redis is not None:
            comparison = ComparisonRun(request, job.id, self.redis)
            build = partial(self._build_compared, comparison)
        run = InferenceRun(self.engine, request, job, self.publisher, build, self.large_results, self.cache, comparison)
        self.tokenizing.put(run)
        return AsyncResult(
            run.ended,
            finish=partial(self._finish, job, run),
            cancel=run.cancel,
            num_rows=num_rows(request),
            has_begun=run.has_begun,
        )

    def _build(self, request: wire.Request, prepared: list[PreparedSequence]) -> wire.Result:
        """Build the result. Raises JobError, FatalError."""
        last = prepared[-1].recomputed or prepared[-1].sequence
        model_info = last.model_info or self.engine.model_info  # a tokenize job is never added to the engine
        check_version(request.if_weights, model_info)  # the weights may have changed before the job began
        try:
            result = to_result(request, prepared, self.engine.chat, provenance_of(self.model, model_info))
        except EngineError as error:
            raise map_engine_error(error) from error
        stamp = with_cached(result.stamp, (each.cached for each in prepared if each.failure is None))
        return result if stamp is result.stamp else replace(result, stamp=stamp)

    def _build_compared(
        self, comparison: ComparisonRun, _: wire.Request, prepared: list[PreparedSequence]
    ) -> wire.Result:
        stamp = provenance_of(self.model, prepared[-1].sequence.model_info or self.engine.model_info)
        return comparison.build(prepared, self.engine.chat, with_cached(stamp, (each.cached for each in prepared)))

    def _finish(self, job: Job, run: "InferenceRun", prepared: list[PreparedSequence]) -> wire.Result | Retry:
        if run.is_pending:
            return RETRY
        result = run.result or run.build(run.request, prepared)
        job.work = max(1.0, work_of(result, prepared))
        is_computed = not result.stamp.cached_items and run.request.adapter is None  # others have other adapters
        is_score = isinstance(run.request, wire.Score) and not isinstance(run.request, wire.Compare)
        if self.crosschecker is not None and isinstance(run.request, wire.Score) and is_score and is_computed:
            self.crosschecker.offer(job, prepared, run.request.temperature, result)
        return result

    def close(self) -> None:
        self.tokenizing.close()
        self.large_results.close()
        self.publisher.close()
        if self.cache is not None:
            self.cache.close()


def work_of(result: wire.Result, prepared: list[PreparedSequence]) -> float:
    """Return how many tokens were read and generated for a job: those of cached sequences were not."""
    cached = sum(len(each.sequence.token_ids) for each in prepared if each.cached)
    return result.usage.prompt_tokens + result.usage.completion_tokens - cached


def check_version(wanted: int | None, model_info: ModelInfo) -> None:
    """Check which version of the weights a job asks for. Raises JobError if it is gone, Postponed if it will come."""
    serving = model_info.weights_version
    if wanted is None or wanted == serving:
        return
    if wanted > serving:
        raise Postponed(WEIGHTS_RETRY_S, {JobField.IF_WEIGHTS: str(wanted)})
    message = f"if_weights: expected version {serving} of the weights, which serves, or a later one, found {wanted}"
    raise JobError(wire.Failure(code="weights_gone", message=message, field="if_weights"))


def check_speculates(model_info: ModelInfo) -> None:
    """Refuse a request for the logprobs of proposed tokens to a model without speculation. Raises JobError."""
    if model_info.speculation not in ("ngram", "draft"):
        raise invalid_request(
            "include_draft_logprobs",
            "expected a model that is served with speculation (SCOREPOOL_SPECULATION, --draft), found one with "
            f"speculation {model_info.speculation}",
        )


def reports_items(request: wire.Request) -> bool:
    """True if an item that fails is reported beside the others."""
    return isinstance(request, wire.Score | wire.Classify) and request.on_item_error == "report"


def _mixes_weights(prepared: list[PreparedSequence]) -> bool:
    """True if other weights scored the generated tokens again than those that generated them."""
    infos = [(each.sequence.model_info, each.recomputed.model_info) for each in prepared if each.recomputed is not None]
    return any(
        generated is not None and scored is not None and generated.weights_version != scored.weights_version
        for generated, scored in infos
    )


def num_rows(request: wire.Request) -> int:
    """Return how many rows of a batch the request fills."""
    match request:
        case wire.Score(items=items) | wire.Classify(items=items) | wire.Embed(items=items):
            return len(items)
        case wire.Generate(n=n):
            return n
        case _:
            return 1


class InferenceRun:
    """One request on its way through the tokenizer and the engine."""

    def __init__(
        self,
        engine: Engine,
        request: wire.Request,
        job: Job,
        publisher: TokenPublisher,
        build: BuildResult,
        large_results: OwnerThread,
        cache: ResultCache | None = None,
        comparison: ComparisonRun | None = None,
    ) -> None:
        self.is_pending = False  # it must run again later, because its base has no result yet
        self.ended: Future[list[PreparedSequence]] = Future()  # never done if the run is canceled
        self.result: wire.Result | None = None  # a large one, built on its own thread before `ended`
        self.request = request
        self._engine = engine
        self.build = build
        self._large_results = large_results
        self._cache = cache if may_be_cached(request) else None
        self._job = job
        self._publisher = publisher
        self.owner = job.owner
        self.num_characters = num_characters(request)
        info = engine.model_info
        self._steps = (
            to_sequences(request, engine.chat, info.context_length, job.owner, info.pooling or "last")
            if comparison is None
            else comparison.steps(info.vocab_size)
        )
        self._sequences: list[Sequence] = []
        self._num_restarts = 0  # because other weights serve
        self._lock = Lock()  # guards the four below
        self._is_canceled = False
        self._group: CachedGroup | None = None
        self._compiled: Future[None] | None = None
        self._added: Future[list[Sequence]] | None = None

    def advance(self, max_characters: int) -> int | None:
        """Tokenize the next texts of the request; add it to the engine after the last. Errors end the job."""
        num_encoded = 0
        try:
            while num_encoded <= max_characters:
                if self._is_canceled:
                    return None
                size = next(self._steps)
                num_encoded += size
        except StopIteration as stop:
            self._start(stop.value)
        except BaseIsPending:
            self.is_pending = True
            self.ended.set_result([])
        except BaseException as error:  # the main thread decides what any error means
            self.ended.set_exception(map_engine_error(error))
        else:
            return size
        return None

    def _start(self, prepared: list[PreparedSequence]) -> None:
        """Add the tokenized request to the engine. Errors end the job."""
        for each in prepared:
            each.sequence.adapter_name = self.request.adapter
        if isinstance(self.request, wire.Tokenize):
            self._end(prepared)
            return
        try:
            constraint = prepared[0].sequence.constraint  # those of the others have the same grammar
            if constraint is None or prepared[0].sequence.sampling is None:
                self._enter(prepared)
                return
            with self._lock:
                self._compiled = constraint.compile()
                if self._is_canceled:
                    self._compiled.cancel()
        except BaseException as error:  # the main thread decides what any error means
            self.ended.set_exception(map_engine_error(error))
        else:
            self._compiled.add_done_callback(partial(self._on_compiled, prepared))

    def _on_compiled(self, prepared: list[PreparedSequence], compiled: "Future[None]") -> None:
        """Enter the engine when the grammar is compiled, which another process does. Runs on any thread."""
        if compiled.cancelled():
            return
        try:
            error = compiled.exception()
            if isinstance(error, InvalidRequest) and isinstance(self.request, wire.Generate):
                raise invalid_grammar(self.request, error)
            self._enter(prepared)
        except BaseException as error:
            self.ended.set_exception(map_engine_error(error))

    def _enter(self, prepared: list[PreparedSequence]) -> None:
        """Add the sequences to the engine. Raises engine.EngineError."""
        if reports_items(self.request):
            prepared = [self._checked(index, each) for index, each in enumerate(prepared)]
            if all(each.failure for each in prepared):
                self._end(prepared)
                return
        with self._lock:
            if self._is_canceled:
                return
            self._added = self._add(prepared)
        self._sequences = [each.sequence for each in prepared]
        self._added.add_done_callback(partial(self._on_done, prepared))

    def _checked(self, index: int, prepared: PreparedSequence) -> PreparedSequence:
        """Return an item with its failure, if the model cannot do what it asks for."""
        if prepared.failure is not None:
            return prepared
        try:
            self._engine.check([prepared.sequence])
        except EngineError as error:
            return prepared.with_error(index, error)
        return prepared

    def _add(self, prepared: list[PreparedSequence]) -> "Future[list[Sequence]]":
        request = self.request
        sequences = [each.sequence for each in prepared if each.failure is None]
        for sequence in sequences:
            sequence.share = Share(self._job.owner, self._job.weight)
        added: Future[list[Sequence]]
        if isinstance(request, wire.Generate) and request.stream:
            added = self._add_streamed(prepared, request.logprobs)
        elif self._cache is not None and isinstance(request, wire.Score | wire.Generate):
            self._group = self._cache.add(sequences, self._job.owner, request.cache_salt)
            added = self._group.future
        else:
            added = self._engine.add(sequences)
        if isinstance(request, wire.Score | wire.Classify):
            self._report_progress(
                JobProgress(self._job.id, sequences, len(prepared) - len(sequences), self._run), added
            )
        return added

    @property
    def _run(self) -> int:
        return int(self._job.leased_at * 1e6) + self._num_restarts  # by Redis's clock

    def _report_progress(self, progress: JobProgress, added: "Future[list[Sequence]]") -> None:
        running = self._publisher.running_jobs
        running.add(progress)
        self._publisher.notify()
        added.add_done_callback(lambda _: running.remove(progress))

    def _add_streamed(self, prepared: list[PreparedSequence], with_logprobs: bool) -> "Future[list[Sequence]]":
        stream = JobStream(self._job.id, prepared, with_logprobs, self._engine.chat, self._run)

        def on_step(advanced: list[Sequence]) -> None:
            stream.on_step(advanced)
            self._publisher.put(stream)

        self._publisher.add(stream)
        try:
            added = self._engine.add([each.sequence for each in prepared], on_step=on_step)
        except BaseException:
            self._publisher.remove(stream)
            raise
        added.add_done_callback(lambda _: self._publisher.remove(stream))
        return added

    def has_begun(self) -> bool:
        """True if a part of it has been computed."""
        if self._group is not None and not self.ended.done():
            return self._group.has_begun()
        return self.ended.done() or any(
            sequence.num_computed or sequence.num_generated or sequence.columns.logprobs for sequence in self._sequences
        )

    def cancel(self) -> None:
        with self._lock:
            self._is_canceled = True
            if self._compiled is not None:
                self._compiled.cancel()
            if self._group is not None and self._cache is not None:
                self._cache.cancel(self._group)
            elif self._added is not None:
                self._engine.cancel(self._added)

    def _on_done(self, prepared: list[PreparedSequence], added: "Future[list[Sequence]]") -> None:
        if added.cancelled():
            return
        error = added.exception()
        if isinstance(error, WeightsReplaced) or (error is None and _mixes_weights(prepared)):
            self._restart([dataclasses.replace(each, recomputed=None) for each in prepared])
        elif error is not None:
            self.ended.set_exception(map_engine_error(error, isinstance(self.request, wire.Score | wire.Classify)))
        elif isinstance(self.request, wire.Generate) and self.request.recompute and prepared[0].recomputed is None:
            self._recompute([each.with_recompute() for each in prepared])
        else:
            if self._group is not None and self._group.cached:
                prepared = [dataclasses.replace(each, cached=each.sequence in self._group.cached) for each in prepared]
            # The engine has filled the sequences that it was given.
            errors = ((each, each.sequence.error) for each in prepared)
            self._end([each.with_error(index, error) if error else each for index, (each, error) in enumerate(errors)])

    def _end(self, prepared: list[PreparedSequence]) -> None:
        """End the job with these sequences. A large result is built on a thread of its own before."""
        num_numbers = sum(len(each.sequence.token_ids) * (1 + each.sequence.top_logprobs) for each in prepared)
        if isinstance(self.request, wire.Compare):
            num_numbers += sum(map(len, (ids for each in prepared for ids in each.sequence.columns.target_logprobs)))
        if num_numbers < LARGE_RESULT:
            self.ended.set_result(prepared)
        else:
            self._large_results.submit(self.owner, partial(self._end_large, prepared))

    def _end_large(self, prepared: list[PreparedSequence]) -> None:
        if self._is_canceled:
            return
        try:
            self.result = self.build(self.request, prepared)
        except BaseException as error:  # the main thread decides what any error means
            self.ended.set_exception(error)
        else:
            self.ended.set_result(prepared)

    def _restart(self, prepared: list[PreparedSequence]) -> None:
        """Compute the job anew, because other weights serve than it began with. Runs on the engine's thread."""
        for each in prepared:
            each.sequence.restart()
        self._num_restarts += 1
        try:
            self._enter(prepared)
        except BaseException as failure:  # the main thread decides what any error means
            self.ended.set_exception(map_engine_error(failure))

    def _recompute(self, prepared: list[PreparedSequence]) -> None:
        """Score the generated tokens again. Runs on the engine's thread."""
        try:
            with self._lock:
                if self._is_canceled:
                    return
                self._added = self._engine.add([each.recomputed for each in prepared if each.recomputed is not None])
        except EngineError as error:
            self.ended.set_exception(map_engine_error(error))
        else:
            self._added.add_done_callback(partial(self._on_done, prepared))
