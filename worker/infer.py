"""The job function wire.INFER: run one wire.Request on the engine; what goes into an engine, and onto its results."""

from functools import partial

import wire
from engine import Engine, EngineSettings, Facts
from worker.failure import JobFailed
from worker.flight import Pending
from worker.job import Job
from worker.translate import Translated, to_result, to_rows
from worker.version import VERSION


class Infer:
    """Callable from the main thread: tokenizes there, and leaves the rest to the engine's thread."""

    def __init__(self, engine: Engine, stamp: wire.Stamp) -> None:
        self.engine = engine
        self.stamp = stamp

    def __call__(self, job: Job) -> Pending:
        """Raises wire.Invalid, engine.Refused, engine.TooLong, JobFailed."""
        if job.request is None:
            raise JobFailed(
                wire.Failure(
                    code="internal",
                    message="the job's request is no longer in Redis; submit it again as a new job",
                )
            )
        request = wire.decode_request(job.request)
        job.request = None  # it may be large, and lies in Redis
        rows = to_rows(request, self.engine.tokenizer)
        future = self.engine.add([translated.row for translated in rows])
        return Pending(future, finish=lambda _: self._finish(request, rows), cancel=partial(self.engine.cancel, future))

    def _finish(self, request: wire.Request, rows: list[Translated]) -> wire.Result:
        """The engine has filled the very rows that it was given."""
        return to_result(request, rows, self.engine.tokenizer, self.stamp)


def engine_settings(source: str, settings: wire.Settings) -> EngineSettings:
    return EngineSettings(
        model=source,
        dtype=settings.dtype,
        max_batch_tokens=settings.max_batch_tokens,
        max_running_rows=settings.max_running_rows,
    )


def stamp_of(model: str, facts: Facts) -> wire.Stamp:
    return wire.Stamp(
        model=model,
        fingerprint=facts.fingerprint,
        dtype=facts.dtype,
        quantization=facts.quantization,
        adapter=facts.adapter,
        mode=facts.mode,
        backend=facts.backend,
        versions={"scorepool": VERSION, **facts.versions},
    )
