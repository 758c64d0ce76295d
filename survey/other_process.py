"""A process beside the survey's own, so that a native crash of what is surveyed does not end the survey."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class ProcessDied(Exception):
    """The other process ended before the function did."""


class OtherProcess:
    """A context with another process. It is replaced when it dies."""

    def __enter__(self) -> Self:
        self._pool = self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """Return what the function returns in the other process. Raises ProcessDied and TimeoutError."""
        try:
            return self._pool.submit(function, *arguments).result(timeout_s)
        except BrokenProcessPool as error:
            self._pool = self._start()
            raise ProcessDied from error

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
