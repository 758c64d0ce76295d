"""One thread that owns a model: callers add groups of rows from any thread, and get a future for each group.

What it does not know: tensors (runner.py), which row runs when (scheduler.py), jobs and queues (the worker).

    add() ──► arrivals ──► scheduler ──plan──► launch ┄┄ read ──► settle ──► Future
                any thread │ the MLX thread
"""

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any, Protocol

from scorepool.engine import mlx_thread
from scorepool.engine.errors import EngineClosed, EngineDeadError, EngineError, LoadError
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.scheduling.prefix_cache import PrefixCache
from scorepool.engine.scheduling.scheduler import Plan, Scheduler
from scorepool.engine.sequence import Sequence
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.validation import check

log = logging.getLogger(__name__)


class Runner(Protocol):
    """The model. Made, used and dropped on the engine's thread. Steps are read in the order of their launch."""

    model_info: ModelInfo
    tokenizer: Tokenizer
    chat: ChatCodec
    can_share: bool  # rows can go on from a prefix that was computed for several

    def launch(self, plan: Plan) -> Any:
        """Begin one step. What is returned is for `read`."""

    def read(self, step: Any) -> dict[Sequence, EngineError | None]:
        """Wait for a step and append to the rows' columns. Returns those rows; with an error where one cannot go on."""

    def release(self, sequences: list[Sequence]) -> None:
        """Forget these rows' caches. A row without one is passed over."""


@dataclass(eq=False, slots=True)
class Group:
    """The rows of one add()."""

    sequences: list[Sequence]
    future: Future[list[Sequence]]
    on_step: Callable[[list[Sequence]], None] | None


def open_runner(settings: EngineSettings) -> Runner:
    """The one place where mlx is loaded: on the engine's thread, after the fast BLAS."""
    from scorepool.engine.model.load import open_model

    return open_model(settings)


class Engine:
    """Ready once constructed. Every method may be called from any thread."""

    model_info: ModelInfo
    tokenizer: Tokenizer
    chat: ChatCodec

    def __init__(self, settings: EngineSettings, open_runner: Callable[[EngineSettings], Runner] = open_runner) -> None:
        """Load the model and test it. Raises LoadError."""
        self.step_started_at: float | None = None  # time.monotonic() of the step that runs now; None while idle
        self._settings = settings
        self._changed = Condition()  # guards the three below
        self._arrivals: deque[Group] = deque()
        self._ended: EngineError | None = None  # why no more groups are taken
        self._wake = False
        self._groups: dict[Sequence, Group] = {}  # of every row that the thread has taken
        ready: Future[None] = Future()
        self._returned = mlx_thread.start(partial(self._main, open_runner, ready))
        ready.result()
        atexit.register(self.close)  # an interpreter that ends in the middle of a step is aborted by mlx

    def add(
        self, sequences: list[Sequence], on_step: Callable[[list[Sequence]], None] | None = None
    ) -> Future[list[Sequence]]:
        """Run these rows as one group. The future gives the same objects when all are done, or an EngineError.

        `on_step` is called with the rows that have new entries, after each step that gave them some, and for the
        last time before the future is done; perhaps once more after `cancel`. It and the future's callbacks run on
        the engine's thread and hold it up. Raises InvalidRequest or
        ContextLengthExceeded if a row asks for what the model cannot do, EngineClosed or EngineDeadError if the
        engine is no more.
        """
        check(sequences, self.model_info)
        group = Group(sequences, Future(), on_step)
        with self._changed:
            if self._ended is not None:
                raise type(self._ended)(self._ended.message)
            self._arrivals.append(group)
            self._changed.notify()
        return group.future

    def cancel(self, future: Future[list[Sequence]]) -> None:
        """Take a group out of the batch before the next step. Too late is harmless."""
        if future.cancel():
            with self._changed:
                self._wake = True
                self._changed.notify()

    def close(self) -> None:
        """End after the running step. Groups that are not done get Closed. Not for a future's callback."""
        atexit.unregister(self.close)
        with self._changed:
            self._ended = self._ended or EngineClosed("the engine was closed")
            self._changed.notify()
        self._returned.wait()

    def _main(self, open_runner: Callable[[EngineSettings], Runner], ready: Future[None]) -> None:
        try:
            runner = open_runner(self._settings)
        except EngineError as error:
            ready.set_exception(error)
            return
        except BaseException as error:
            log.exception("the model %r cannot be loaded", self._settings.model)
            reason = f"{type(error).__name__}: {error}"
            failure = LoadError(f"the model {self._settings.model!r} cannot be loaded: {reason}")
            failure.__cause__ = error
            ready.set_exception(failure)
            return
        self.model_info, self.tokenizer, self.chat = runner.model_info, runner.tokenizer, runner.chat
        ready.set_result(None)
        try:
            self._serve(runner)
        except BaseException as error:
            log.exception("the engine failed in a step with %d rows", len(self._groups))
            self._end(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
        else:
            self._end(EngineClosed("the engine was closed"))

    def _serve(self, runner: Runner) -> None:
        """Each step is launched before the one before it is read, so that neither host nor device waits."""
        settings = self._settings
        prefixes = PrefixCache(settings.prefix_cache_bytes) if runner.can_share else None
        scheduler = Scheduler(
            settings.max_batch_tokens, settings.max_running_rows, runner.model_info.max_cached_tokens, prefixes
        )
        launched: Any = None
        while self._await_work(scheduler, launched):
            self.step_started_at = time.monotonic()
            self._take_arrivals(scheduler)
            if self._wake:
                self._drop_canceled(scheduler, runner)
            before, launched = launched, None
            plan = scheduler.plan()
            if not plan.is_empty:
                launched = runner.launch(plan)
                runner.release(scheduler.advance(plan))
            if before is not None:
                self._settle(runner.read(before), scheduler, runner)
            self.step_started_at = None

    def _await_work(self, scheduler: Scheduler, launched: Any) -> bool:
        """Sleep until there is something to do. False: the engine is to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: launched is not None or scheduler.has_work or self._arrivals or self._wake or self._ended
            )
            return self._ended is None

    def _take_arrivals(self, scheduler: Scheduler) -> None:
        with self._changed:
            arrived = list(self._arrivals)
            self._arrivals.clear()
        for group in arrived:
            for sequence in group.sequences:
                self._groups[sequence] = group
                if sequence.score_from == 0:
                    sequence.append_unpredicted()
            unfinished = [sequence for sequence in group.sequences if not sequence.is_done]
            scheduler.add(unfinished)
            if not unfinished:
                self._resolve(group)

    def _drop_canceled(self, scheduler: Scheduler, runner: Runner) -> None:
        self._wake = False  # before the look: what is canceled now is seen now or wakes again
        canceled = [sequence for sequence, group in self._groups.items() if group.future.cancelled()]
        groups = {self._groups[sequence]: None for sequence in canceled}
        self._forget(canceled, scheduler, runner)
        for group in groups:  # last: `_end` takes no future that was notified
            group.future.set_running_or_notify_cancel()

    def _settle(self, read: dict[Sequence, EngineError | None], scheduler: Scheduler, runner: Runner) -> None:
        """End the groups that a failed row belongs to, tell the others, resolve those that are complete."""
        for sequence, error in read.items():
            group = self._groups.get(sequence)
            if error is None or group is None:  # another row of the group failed in this step
                continue
            self._forget(group.sequences, scheduler, runner)
            if group.future.set_running_or_notify_cancel():
                group.future.set_exception(error)
        ended = [sequence for sequence in read if sequence.is_done]
        scheduler.remove(ended)  # a stop string ends a row that has been launched again since
        runner.release(ended)
        grown: dict[Group, list[Sequence]] = {}
        for sequence in read:
            if sequence in self._groups:
                grown.setdefault(self._groups[sequence], []).append(sequence)
        for group, sequences in grown.items():
            if group.on_step is not None:
                group.on_step(sequences)
            if all(sequence.is_done for sequence in group.sequences):
                self._resolve(group)

    def _resolve(self, group: Group) -> None:
        for sequence in group.sequences:
            del self._groups[sequence]
        if group.future.set_running_or_notify_cancel():
            group.future.set_result(group.sequences)

    def _forget(self, sequences: list[Sequence], scheduler: Scheduler, runner: Runner) -> None:
        if not sequences:
            return
        scheduler.remove(sequences)
        runner.release(sequences)
        for sequence in sequences:
            self._groups.pop(sequence, None)

    def _end(self, reason: EngineError) -> None:
        """Take nothing more, and tell everybody who waits."""
        with self._changed:
            self._ended = self._ended if isinstance(self._ended, EngineDeadError) else reason
            waiting = [*dict.fromkeys(self._groups.values()), *self._arrivals]
            self._groups.clear()
            self._arrivals.clear()
        self.step_started_at = None
        for group in waiting:
            if group.future.set_running_or_notify_cancel():
                group.future.set_exception(reason)
