"""One request on its way through tokenizer and engine. run_inference.py draws its threads."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock

from scorepool import wire
from scorepool.engine import Engine, EngineError, InvalidRequest, Sequence, Share, WeightsReplaced
from scorepool.worker.inference.checkpoints.checkpoint_store import CheckpointStore
from scorepool.worker.inference.checkpoints.job_checkpoint import JobCheckpoint
from scorepool.worker.inference.checkpoints.rows import may_be_kept
from scorepool.worker.inference.comparison_run import BaseIsPending, ComparisonRun
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.images import num_characters_of_images
from scorepool.worker.inference.job_progress import JobProgress
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.owner_turns import OwnerThread
from scorepool.worker.inference.prepared import PreparedSequence, share_equal, to_run
from scorepool.worker.inference.result_cache.digest import may_be_cached
from scorepool.worker.inference.result_cache.result_cache import CachedGroup, ResultCache, are_alike
from scorepool.worker.inference.structured_outputs import invalid_grammar
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.translate import num_characters, to_sequences
from scorepool.worker.rq.job import Job

LARGE_RESULT = 65_536  # numbers of a result that takes 0.05 s to build
BuildResult = Callable[[wire.Request, list[PreparedSequence]], wire.Result]


def scope_of(request: wire.Request, owner: str) -> str | None:
    """Return with whom a job shares computed prefixes: with all jobs, or with those of its owner and its salt."""
    salt = request.cache_salt if isinstance(request, wire.Score | wire.Generate | wire.Classify) else None
    return None if salt is None else f"{owner}\n{salt}"


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
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self.is_pending = False  # it must run again later, because its base has no result yet
        self.ended: Future[list[PreparedSequence]] = Future()  # never done if the run is canceled
        self.result: wire.Result | None = None  # a large one, built on its own thread before `ended`
        self.request = request
        self._engine = engine
        self.build = build
        self._large_results = large_results
        self._cache = cache if may_be_cached(request) else None
        self._checkpoints = checkpoints
        self._checkpoint: JobCheckpoint | None = None
        if checkpoints is not None and may_be_kept(request):
            self._checkpoint = JobCheckpoint(job, lambda: engine.model_info)
        self._job = job
        self._publisher = publisher
        self.owner = job.owner
        self.num_characters = num_characters(request) + num_characters_of_images(request)
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
            each.sequence.prefix_scope = scope_of(self.request, self._job.owner)  # of rows that a checkpoint has, too
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
        if self._checkpoints is not None and self._checkpoint is not None and self._checkpoint.may_restore:
            rows = {index: each.sequence for index, each in enumerate(prepared) if each.is_to_run}
            info = self._engine.model_info_of(self.request.adapter)
            self._checkpoints.restore(self._checkpoint, rows, info, partial(self._on_restored, prepared))
        else:
            self._run_engine(prepared)

    def _on_restored(self, prepared: list[PreparedSequence], restored: frozenset[int]) -> None:
        """Compute the rows that an earlier run has not finished. Runs on the thread of the checkpoints."""
        try:
            self._run_engine(
                [dataclasses.replace(each, is_restored=index in restored) for index, each in enumerate(prepared)]
            )
        except BaseException as error:  # the main thread decides what any error means
            self.ended.set_exception(map_engine_error(error))

    def _run_engine(self, prepared: list[PreparedSequence]) -> None:
        """Add the sequences that must be computed to the engine. Raises engine.EngineError."""
        if not any(each.is_to_run for each in prepared):
            self._end(prepared)
            return
        if isinstance(self.request, wire.Classify | wire.Embed):
            prepared = share_equal(prepared)
        with self._lock:
            if self._is_canceled:
                return
            try:
                self._added = self._add(prepared)
            except EngineError as error:
                _count_all(error, prepared)
                raise
        self._sequences = to_run(prepared)
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
        sequences = to_run(prepared)
        for sequence in sequences:
            sequence.share = Share(self._job.owner, self._job.weight, has_others=self._job.is_of_one_of_several)
        added: Future[list[Sequence]]
        if isinstance(request, wire.Generate) and request.stream:
            added = self._add_streamed(prepared, request.logprobs)
        elif self._cache is not None and isinstance(request, wire.Score | wire.Generate):
            self._group = self._cache.add(sequences, self._job.owner, request.cache_salt)
            added = self._group.future
        else:
            added = self._engine.add(sequences)
        if isinstance(request, wire.Score | wire.Classify):
            valid = [each.sequence for each in prepared if each.failure is None]
            self._report_progress(JobProgress(self._job.id, valid, len(prepared) - len(valid), self._run), added)
        if self._checkpoints is not None and self._checkpoint is not None:
            self._keep_rows(self._checkpoints, self._checkpoint, prepared, added)
        return added

    def _keep_rows(
        self,
        checkpoints: CheckpointStore,
        checkpoint: JobCheckpoint,
        prepared: list[PreparedSequence],
        added: "Future[list[Sequence]]",
    ) -> None:
        """Keep rows when they are finished, for the next worker if this one dies."""
        checkpoint.rows = {index: each.sequence for index, each in enumerate(prepared) if each.is_to_run}
        checkpoints.add(checkpoint)
        added.add_done_callback(lambda _: checkpoints.remove(checkpoint))

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
        return self.ended.done() or any(sequence.has_begun for sequence in self._sequences)

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
            self._restart([dataclasses.replace(each, recomputed=None, is_restored=False) for each in prepared])
        elif error is not None:
            if isinstance(error, EngineError):
                _count_all(error, prepared)
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


def reports_items(request: wire.Request) -> bool:
    """True if an item that fails is reported beside the others."""
    return isinstance(request, wire.Score | wire.Classify) and request.on_item_error == "report"


def _mixes_weights(prepared: list[PreparedSequence]) -> bool:
    """True if some rows were computed, or scored again, by other weights than the others or by another adapter."""
    restored = next((each.sequence.model_info for each in prepared if each.is_restored), None)
    if restored is not None:
        computed = [each.sequence for each in prepared if each.is_to_run and each.sequence.error is None]
        if not all(are_alike(sequence.model_info, restored) for sequence in computed):
            return True
    infos = [(each.sequence.model_info, each.recomputed.model_info) for each in prepared if each.recomputed is not None]
    return any(
        generated is not None and scored is not None and not are_alike(generated, scored) for generated, scored in infos
    )


def _count_all(error: EngineError, prepared: list[PreparedSequence]) -> None:
    """Let the index of an error count all rows of a job, not only those that the engine was given."""
    if error.index is not None:
        sequence = to_run(prepared)[error.index]
        error.index = next(index for index, each in enumerate(prepared) if each.sequence is sequence)


def num_rows(request: wire.Request) -> int:
    """Return how many rows of a batch the request fills."""
    match request:
        case wire.Score(items=items) | wire.Classify(items=items) | wire.Embed(items=items):
            return len(items)
        case wire.Generate(n=n):
            return n
        case _:
            return 1
