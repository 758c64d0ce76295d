"""Load checkpoints with the engine's loader, in a process of its own: a native crash must not end the survey."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine computes for the rows, or why it does not."""

    logprobs: list[np.ndarray] = field(
        default_factory=list
    )  # [length, vocab] per row, cut to the context that is served
    refusal: str = ""  # the text of the LoadError
    crash: str = ""  # any other error, or the death of the process


class Loader:
    """A context in which checkpoints are loaded by another process, which is replaced when it dies."""

    def __enter__(self) -> Self:
        self._pool = self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def serve(self, folder: Path, rows: list[list[int]], *, checks_settings: bool) -> Served:
        """Load the checkpoint and compute the rows. Without `checks_settings`, the table of settings is not asked."""
        try:
            return self._pool.submit(_serve, str(folder), rows, checks_settings).result(TIMEOUT_S)
        except BrokenProcessPool:
            self._pool = self._start()
            return Served(crash="the process died")

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _serve(folder: str, rows: list[list[int]], checks_settings: bool) -> Served:
    import mlx.core as mx

    from scorepool.engine.errors import LoadError
    from scorepool.engine.model import kv_cache
    from scorepool.engine.model.load import count_logits, load_checked
    from scorepool.engine.sampling.scoring import log_normalizer

    try:
        model, _, position_limit = load_checked(Path(folder), "float32", checks_settings=checks_settings)
        count_logits(model)
        logprobs = []
        for row in rows:
            logits = model(mx.array([row[:position_limit]]), cache=kv_cache.new(model))[0].astype(mx.float32)
            logprobs.append(np.array(logits - log_normalizer(logits)[:, None]))
        return Served(logprobs)
    except LoadError as error:
        return Served(refusal=str(error))
    except (Exception, SystemExit) as error:  # any: the survey reports it; mlx-lm's olmo exits
        return Served(crash=f"{type(error).__name__}: {error}")
