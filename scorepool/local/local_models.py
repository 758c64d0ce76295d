"""Compute jobs on this machine as the server that holds their results did: for `scorepool verify --model`."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from scorepool import wire
from scorepool.local.demo import free_port
from scorepool.local.redis_server import RedisServerError
from scorepool.local.stack import PRIVATE, Stack, StackError
from scorepool.sdk import Client
from scorepool.verify import CannotTell, Recompute, on_server


class LocalModels:
    """A context that runs a stack of its own for one model at a time, in the dtype and mode of the result."""

    def __init__(self, sources: Mapping[str, str], state: Path, timeout_s: float) -> None:
        """`sources` are folders or hub ids by the names of the models."""
        self._sources = sources
        self._state = state
        self._timeout_s = timeout_s
        self._open = ExitStack()
        self._running: tuple[str, str, str] | None = None  # model, dtype, mode
        self._recompute: Recompute | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def recompute_of(self, job: wire.Job) -> Recompute:
        """Return what computes requests like that of the job. Raises CannotTell."""
        if job.model not in self._sources:
            raise CannotTell(f"its model is {job.model!r}, and --model names {', '.join(self._sources)}")

        def recompute(request: wire.Score) -> wire.Result:
            assert job.result is not None
            return self._started(job.model, job.result.stamp)(request)

        return recompute

    def _started(self, model: str, stamp: wire.Provenance) -> Recompute:
        """Start the model in the dtype and mode of the stamp, unless it runs already. Raises CannotTell."""
        wanted = (model, stamp.dtype, stamp.mode)
        if self._recompute is None or self._running != wanted:
            self._open.close()
            self._recompute = None
            environ = {
                **PRIVATE,
                "SCOREPOOL_PORT": str(free_port()),
                "SCOREPOOL_WEBHOOK_SECRET": "",
                "SCOREPOOL_REDIS_MIN_REPLICAS": "0",
                "SCOREPOOL_DTYPE": stamp.dtype,
                "SCOREPOOL_MODE": "exact" if stamp.mode == "exact" else "default",
            }
            spec = f"{model}={self._sources[model]}"
            try:
                stack = self._open.enter_context(
                    Stack([spec], state=self._state, environ=environ, logs=self._state / "logs")
                )
            except (StackError, RedisServerError) as error:
                first, *rest = str(error).splitlines()
                raise CannotTell(" ".join([f"{spec} does not start: {first}", *rest[-1:]])) from None
            self._recompute = on_server(self._open.enter_context(Client(stack.url)), self._timeout_s)
            self._running = wanted
        return self._recompute
