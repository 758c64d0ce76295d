"""The job function store.INFER: run one wire.Request on the engine.

main thread        InferenceRunner(job)                            to_result, if small ──► wire.Result
                         │                                                       ▲
tokenizer threads        └──► InferenceRun.advance: to_sequences ──► engine.add  │
grammars' thread                     (a constraint is compiled first) ──┘ │      │
engine's thread                                                           └──► _on_done ──► ended
results' thread                                             to_result, if large ──┘
"""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace
from redis import Redis
from rq.job import Retry

from scorepool import wire
from scorepool.engine import Engine, EngineError, ModelInfo
from scorepool.store import JobField
from scorepool.store.result_store import ResultStore
from scorepool.worker.inference.checkpoints.checkpoint_store import CheckpointStore
from scorepool.worker.inference.comparison_run import RETRY, ComparisonRun
from scorepool.worker.inference.crosschecker import Crosschecker
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.inference_run import InferenceRun, num_rows
from scorepool.worker.inference.owner_turns import OwnerThread
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of, with_approximation, with_cached, with_images
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.result_cache.result_cache import ResultCache
from scorepool.worker.inference.text_lengths import invalid_request
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.inference.tokenizing import TokenizingQueue
from scorepool.worker.inference.translate import with_seed
from scorepool.worker.rq.errors import JobError, Postponed
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job

ADAPTER_RETRY_S = 5  # after which a job whose adapter this worker could not load is claimed again, by any worker
WEIGHTS_RETRY_S = 5  # after which a job looks again whether the weights that it waits for serve


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
        checkpoints: CheckpointStore | None = None,
        result_store: ResultStore | None = None,
        is_adapter_missing: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`is_adapter_missing` tells of an adapter that is served, but that this worker could not load."""
        self.redis = redis  # of compare jobs, which read their base's result
        self.engine = engine
        self.cache = cache
        self.checkpoints = checkpoints
        self.result_store = result_store  # of compare jobs too
        self.model = model
        self.publisher = publisher
        self.crosschecker = crosschecker
        self._is_adapter_missing = is_adapter_missing
        self.tokenizing = TokenizingQueue()
        self.large_results = OwnerThread("results")

    def __call__(self, job: Job) -> AsyncResult:
        """Start the job. Raises wire.Invalid, JobError, Postponed."""
        if job.request is None:
            raise JobError(
                wire.Failure(
                    code="internal",
                    message="the job's request is no longer in Redis; submit it again as a new job",
                )
            )
        request = with_seed(wire.decode_request(job.request), job.id)
        request = wire.with_top_k(request, self.engine.model_info.vocab_size)
        if isinstance(request, wire.Generate):
            check_speculates(request, self.engine.model_info)
            check_leaves_out(request, self.engine.model_info)
        check_version(request.if_weights, self.engine.model_info)
        if request.adapter is not None and self._is_adapter_missing(request.adapter):
            raise Postponed(ADAPTER_RETRY_S, {})
        job.request = None  # it may be large, and Redis has it
        comparison, build = None, self._build
        if isinstance(request, wire.Compare) and self.redis is not None:
            comparison = ComparisonRun(request, job.id, self.redis, self.result_store)
            build = partial(self._build_compared, comparison)
        run = InferenceRun(
            self.engine,
            request,
            job,
            self.publisher,
            build,
            self.large_results,
            self.cache,
            comparison,
            self.checkpoints,
        )
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
        model_info = self._info_of(request, prepared)
        check_version(request.if_weights, model_info)  # the weights may have changed before the job began
        try:
            sequences = [each.sequence for each in prepared]
            stamp = with_images(provenance_of(self.model, model_info), sequences)
            result = to_result(request, prepared, self.engine.chat, with_approximation(stamp, sequences))
        except EngineError as error:
            raise map_engine_error(error) from error
        stamp = with_cached(result.stamp, (each.cached for each in prepared if each.failure is None))
        return result if stamp is result.stamp else replace(result, stamp=stamp)

    def _info_of(self, request: wire.Request, prepared: list[PreparedSequence]) -> ModelInfo:
        """Return the model that computed a job; the one that would now, if all items failed or were only tokenized."""
        computed = (each.recomputed or each.sequence for each in reversed(prepared) if each.failure is None)
        infos = (one.model_info for one in computed if one.model_info is not None)
        return next(infos, None) or self.engine.model_info_of(request.adapter)

    def _build_compared(
        self, comparison: ComparisonRun, request: wire.Request, prepared: list[PreparedSequence]
    ) -> wire.Result:
        model_info = self._info_of(request, prepared)
        check_version(comparison.request.if_weights, model_info)
        stamp = provenance_of(self.model, model_info)
        return comparison.build(prepared, self.engine.chat, with_cached(stamp, (each.cached for each in prepared)))

    def _finish(self, job: Job, run: InferenceRun, prepared: list[PreparedSequence]) -> wire.Result | Retry:
        if run.is_pending:
            return RETRY
        result = run.result or run.build(run.request, prepared)
        job.work = max(1.0, work_of(result, prepared))
        is_computed = not result.stamp.cached_items and run.request.adapter is None  # others have other adapters
        is_score = isinstance(run.request, wire.Score) and not isinstance(run.request, wire.Compare)
        is_score = is_score and not any(each.sequence.images for each in prepared)  # another worker is sent tokens only
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
    """Return how many tokens this run has read and generated for a job."""
    others = sum(len(each.sequence.token_ids) for each in prepared if each.cached or each.is_restored)
    return result.usage.prompt_tokens + result.usage.completion_tokens - others


def check_version(wanted: int | None, model_info: ModelInfo) -> None:
    """Check which version of the weights a job asks for. Raises JobError if it is gone, Postponed if it will come."""
    serving = model_info.weights_version
    if wanted is None or wanted == serving:
        return
    if wanted > serving:
        raise Postponed(WEIGHTS_RETRY_S, {JobField.IF_WEIGHTS: str(wanted)})
    message = f"if_weights: expected version {serving} of the weights, which serves, or a later one, found {wanted}"
    raise JobError(wire.Failure(code="weights_gone", message=message, field="if_weights"))


def check_speculates(request: wire.Generate, model_info: ModelInfo) -> None:
    """Refuse what a request asks of a speculation that the model is not served with. Raises JobError."""
    has = model_info.speculations
    if request.speculation is not None and request.speculation not in has:
        raise invalid_request(
            "speculation",
            f"expected {' or '.join(has)}, which this worker has (SCOREPOOL_SPECULATION, --draft), found "
            f"{request.speculation}",
        )
    for field in ("include_draft_logprobs", "speculation_tokens"):
        if getattr(request, field) and len(has) == 1:
            raise invalid_request(
                field,
                "expected a model that is served with speculation (SCOREPOOL_SPECULATION, --draft), found one with "
                f"speculation {model_info.speculation}",
            )


def check_leaves_out(request: wire.Generate, model_info: ModelInfo) -> None:
    """Refuse a sparse prefill that the model is not served with. Raises JobError."""
    if request.specprefill and model_info.whole_prompts is not None:
        raise invalid_request(
            "specprefill",
            f"expected false on this worker: {model_info.whole_prompts} (--draft, SCOREPOOL_DRAFTS)",
        )
