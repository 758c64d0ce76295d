"""The job function store.INFER: run one wire.Request on the engine; what goes into an engine, and onto its results."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

from scorepool import store, wire
from scorepool.engine import Engine, EngineError, EngineSettings, ModelInfo
from scorepool.engine import Sequence as Row
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.token_publisher import JobStream, TokenPublisher
from scorepool.worker.inference.translate import Translated, refuse_hopeless, to_rows, with_seed
from scorepool.worker.rq.errors import JobError
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.version import VERSION


class Infer:
    """Callable from the main thread. Tokenizing a long text takes seconds, so it has a thread of its own."""

    def __init__(self, engine: Engine, stamp: wire.Provenance, outlet: TokenPublisher) -> None:
        self.engine = engine
        self.stamp = stamp
        self.outlet = outlet
        self.tokenizing_since: float | None = None  # time.monotonic()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def __call__(self, job: Job) -> AsyncResult:
        """Raises wire.Invalid, JobError."""
        if job.request is None:
            raise JobError(
                wire.Failure(
                    code="internal",
                    message="the job's request is no longer in Redis; submit it again as a new job",
                )
            )
        request = with_seed(wire.decode_request(job.request), job.id)
        job.request = None  # it may be large, and lies in Redis
        run = Run(self.engine, request, job.id, self.outlet)
        self._tokenizing.submit(self._tokenize, run)
        return AsyncResult(run.ended, finish=partial(self._finish, request), cancel=run.cancel)

    def _tokenize(self, run: "Run") -> None:
        self.tokenizing_since = time.monotonic()
        run.start()
        self.tokenizing_since = None

    def _finish(self, request: wire.Request, rows: list[Translated]) -> wire.Result:
        try:
            return to_result(request, rows, self.engine.tokenizer, self.stamp)
        except EngineError as error:
            raise map_engine_error(error) from error

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self.outlet.close()


class Run:
    """One request on its way through tokenizer and engine."""

    def __init__(self, engine: Engine, request: wire.Request, job_id: str, outlet: TokenPublisher) -> None:
        self.ended: Future[list[Translated]] = Future()  # the rows as the engine left them; never, once canceled
        self._engine = engine
        self._request = request
        self._job_id = job_id
        self._outlet = outlet
        self._lock = Lock()  # guards the two below
        self._is_canceled = False
        self._added: Future[list[Row]] | None = None

    def start(self) -> None:
        """On the tokenizer's thread. What is raised ends the job."""
        if self._is_canceled:
            return
        try:
            refuse_hopeless(self._request, self._engine.tokenizer, self._engine.model_info.context_length)
            rows = to_rows(self._request, self._engine.tokenizer, self._engine.model_info.context_length)
            if isinstance(self._request, wire.Tokenize):
                self.ended.set_result(rows)
                return
            with self._lock:
                if self._is_canceled:
                    return
                self._added = self._add(rows)
        except BaseException as error:  # whatever it is, the main thread decides what it means
            self.ended.set_exception(map_engine_error(error))
        else:
            self._added.add_done_callback(partial(self._pass_on, rows))

    def _add(self, translated: list[Translated]) -> "Future[list[Row]]":
        request = self._request
        rows = [one.row for one in translated]
        if not isinstance(request, wire.Generate) or not request.stream:
            return self._engine.add(rows)
        grower = JobStream(self._job_id, translated, request.logprobs, self._engine.tokenizer)
        return self._engine.add(rows, on_step=lambda grown: self._outlet.put(grower.on_step(grown)))

    def cancel(self) -> None:
        with self._lock:
            self._is_canceled = True
            if self._added is not None:
                self._engine.cancel(self._added)

    def _pass_on(self, rows: list[Translated], added: "Future[list[Row]]") -> None:
        if added.cancelled():
            return
        if error := added.exception():
            self.ended.set_exception(map_engine_error(error))
        elif isinstance(self._request, wire.Generate) and self._request.recompute and rows[0].again is None:
            self._recompute([row.to_recompute() for row in rows])
        else:
            self.ended.set_result(rows)  # the very rows that the engine was given, filled

    def _recompute(self, rows: list[Translated]) -> None:
        """Score what was generated, on the engine's thread."""
        try:
            with self._lock:
                if self._is_canceled:
                    return
                self._added = self._engine.add([row.again for row in rows if row.again is not None])
        except EngineError as error:
            self.ended.set_exception(map_engine_error(error))
        else:
            self._added.add_done_callback(partial(self._pass_on, rows))


def engine_settings(source: str, settings: store.Settings) -> EngineSettings:
    return EngineSettings(
        model=source,
        dtype=settings.dtype,
        mode=settings.mode,
        max_batch_tokens=settings.max_batch_tokens,
        max_running_rows=settings.max_running_rows,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        memory_bytes=settings.memory_bytes or None,
    )


def stamp_of(model: str, model_info: ModelInfo) -> wire.Provenance:
    return wire.Provenance(
        model=model,
        fingerprint=model_info.fingerprint,
        dtype=model_info.dtype,
        quantization=model_info.quantization,
        adapter=model_info.adapter,
        mode=model_info.mode,
        backend=model_info.backend,
        versions={"scorepool": VERSION, **model_info.versions},
    )
