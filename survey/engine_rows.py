"""Run rows through the real engine in every way in which it runs them, in a process of its own."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from survey.other_process import OtherProcess, ProcessDied

TIMEOUT_S = 300.0
MAX_BATCH_TOKENS = 120  # so that the longest rows run in chunks
_VOCAB_SIZE = 500  # of the tiny models, or fewer
_BOS = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One finished row: `logprobs` are those of `token_ids[first:]`."""

    way: str  # "alone", "batch", "shared prompt", "generated"
    token_ids: list[int]
    first: int
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine did with a checkpoint."""

    mode: str = ""  # of ModelInfo
    self_test: str = ""
    context_length: int = 0  # tokens
    rows: list[Row] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # classes of mlx-lm whose code the engine replaces or wraps
    refusal: str = ""  # the text of the LoadError
    crash: str = ""  # any other error, or the death of the process


class EngineProcess(OtherProcess):
    """A context in which checkpoints are served by another process."""

    def serve(self, folder: Path, seed: int, **settings: str) -> Served:
        """Open an engine of the checkpoint and run all rows that `seed` draws."""
        try:
            return self.run(_serve, str(folder), seed, settings, timeout_s=TIMEOUT_S)
        except ProcessDied:
            return Served(crash="the process died")


def _serve(folder: str, seed: int, settings: Any) -> Served:
    import logging

    from scorepool.engine import Engine, EngineSettings, LoadError

    logging.getLogger("scorepool.engine").setLevel(logging.CRITICAL)  # the outcome says what is logged
    try:
        engine = Engine(EngineSettings(model=folder, max_batch_tokens=MAX_BATCH_TOKENS, **settings))
    except LoadError as error:
        return Served(refusal=str(error))
    except (Exception, SystemExit) as error:  # any: the survey reports it
        return Served(crash=f"{type(error).__name__}: {error}")
    info = engine.model_info
    try:
        rows = _run(engine, seed, min(info.context_length, 512))
        return Served(info.mode, info.self_test, info.context_length, rows, replaced_classes(folder))
    except Exception as error:  # any: the survey reports it
        return Served(info.mode, info.self_test, info.context_length, crash=f"{type(error).__name__}: {error}")
    finally:
        engine.close()


def replaced_classes(folder: str) -> list[str]:
    """Load a checkpoint as the engine does, and name the classes of its modules that mend mlx-lm's."""
    from scorepool.engine.model import cpu_kernels, idefics3
    from scorepool.engine.model.load import load_checked

    with mock.patch.object(cpu_kernels, "install"):  # which mends nothing, and is not for every machine
        model, _, _ = load_checked(Path(folder), "float32", checks_settings=False)
    kinds = {type(module) for module in model.modules()} - {idefics3.Model}
    return sorted({kind.__name__.lstrip("_") for kind in kinds if kind.__module__.startswith("scorepool.")})


def _run(engine: Any, seed: int, context_length: int) -> list[Row]:
    """Score rows alone, in a batch with others that generate, and with a shared prompt."""
    draw = _Drawn(seed, context_length)
    question = draw.tokens(70)
    batches = {
        "alone": [[draw.scored(length, 1)] for length in (9, 99, 150)],
        "batch": [
            [
                draw.generating(5, 40),
                draw.scored(60, 30),
                draw.scored(3, 1),
                draw.generating(33, 9),
                draw.generating(21, 20),
                draw.scored(170, 2),  # longer than MAX_BATCH_TOKENS
                draw.generating(150, 12),
                draw.generating(2, 30),
                draw.scored(14, 1),
            ]
        ],
        "shared prompt": [
            [draw.scored(0, 70, before=question, extra=1 + extra) for extra in range(3)],
            [draw.generating(40, max_tokens, seed=12) for max_tokens in (1, 20, 22)],
        ],
    }
    rows: list[Row] = []
    for way, batches_of_way in batches.items():
        for batch in batches_of_way:
            for future in [engine.add([sequence]) for sequence in batch]:
                future.result(100)
            rows += [_finished(sequence, way) for sequence in batch]
    return rows


def _finished(sequence: Any, way: str) -> Row:
    first = sequence.num_input_tokens if sequence.score_from is None else sequence.score_from
    return Row("generated" if sequence.sampling else way, sequence.token_ids, first, sequence.columns.logprobs)


class _Drawn:
    """Sequences of drawn tokens, none longer than the context."""

    def __init__(self, seed: int, context_length: int) -> None:
        self._draw = Random(seed)  # noqa: S311
        self._context_length = context_length

    def tokens(self, length: int, seed: int | None = None) -> list[int]:
        draw = self._draw if seed is None else Random(seed)  # noqa: S311
        return [_BOS] + [draw.randrange(3, _VOCAB_SIZE) for _ in range(length - 1)]

    def scored(self, length: int, score_from: int, before: list[int] | None = None, extra: int = 0) -> Any:
        from scorepool.engine import Sequence

        token_ids = [*before, *self.tokens(1 + extra)] if before else self.tokens(length)
        token_ids = token_ids[: self._context_length]
        return Sequence(token_ids=token_ids, score_from=min(score_from, len(token_ids) - 1))

    def generating(self, length: int, max_tokens: int, seed: int | None = None) -> Any:
        from scorepool.engine import Sampling, Sequence

        max_tokens = min(max_tokens, self._context_length - 1)
        token_ids = self.tokens(length, seed)[: self._context_length - max_tokens]
        sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return Sequence(token_ids=token_ids, sampling=sampling)
