"""The engine: a model on the MLX thread. Callers add groups of sequences from any thread; each gets a future.

Several engines may share the thread and the memory: see engine_loop.py and residency.py. Knows no steps (core.py), no
tensors (model/runner.py), no jobs and no queues (the worker).

    add(), control() ──► inbox ──► EngineCore ──► Future
              any thread │ the MLX thread
"""

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from scorepool.engine.adapter import Adapter
from scorepool.engine.adapter_messages import LoadAdapter, StageAdapter, UnloadAdapter
from scorepool.engine.control import (
    BeginSwitch,
    ClearPrefixCache,
    ControlCall,
    ControlMessage,
    DiscardStaged,
    DropWeights,
    StageWeights,
)
from scorepool.engine.core import EngineCore
from scorepool.engine.engine_loop import EngineLoop, Turns
from scorepool.engine.errors import AdapterError, EngineClosed, EngineDeadError, EngineError, LoadError, ReloadError
from scorepool.engine.group import Group, WeightsSwitch
from scorepool.engine.memory_share import MemoryShare
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.runner import Runner
from scorepool.engine.scheduling.stats import EngineStats
from scorepool.engine.sequence import Sequence
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.trial import Trial
from scorepool.engine.validation import check

NEED_WEIGHTS = (LoadAdapter, StageAdapter)  # messages before which dropped weights are loaded again

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_runner(settings: EngineSettings) -> Runner:
    """Load the model. Only this function imports mlx, which must happen on the MLX thread and after the fast BLAS."""
    with Trial(settings) as trial:
        from scorepool.engine.model.load import open_model

        trial.wait()
        return open_model(settings)


class Engine:
    """A model that scores and generates, ready once constructed. Every method may be called from any thread."""

    model_info: ModelInfo  # of the model that is loaded now; a result's own is in its sequences
    tokenizer: Tokenizer
    chat: ChatCodec
    adapters: Iterable[Adapter] = ()  # that sequences can name

    def __init__(
        self,
        settings: EngineSettings,
        open_runner: Callable[[EngineSettings], Runner] = open_runner,
        loop: EngineLoop | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Load the model and test it; raise LoadError if it cannot be served.

        `loop` is shared with other engines, whose weights are dropped if there is no room for `num_bytes` beside them.
        """
        self.step_started_at: float | None = None  # time.monotonic() of the step that runs now; None while idle
        self.load = (0, 0)  # see EngineCore.load; as of the last step
        self.stats = EngineStats()  # as of the last step
        self.is_loaded = True  # False: the weights were dropped
        self._settings = settings
        self._loop = loop or EngineLoop()
        self._memory = MemoryShare(self._loop.residency, num_bytes)
        self.resident = self._memory.resident
        self._changed = self._loop.changed  # guards the four below
        self._arrivals: deque[Group] = deque()
        self._control_calls: deque[ControlCall[Any]] = deque()
        self._has_canceled = False
        self._ended: EngineError | None = None  # why new work is refused
        ready: Future[None] = Future()
        self._returned = self._loop.start(self._main(open_runner, ready))
        try:
            ready.result()
        except LoadError:
            self._returned.wait()  # the interpreter may end now, and must not while the MLX thread drops its arrays
            raise
        atexit.register(self.close)  # mlx aborts an interpreter that ends in the middle of a step

    @property
    def has_to_wait(self) -> bool:
        """True if groups that are added now wait until the weights of another model have been dropped."""
        return self._memory.has_to_wait

    def check(self, sequences: list[Sequence]) -> None:
        """Check what sequences ask for. Raises InvalidRequest, ContextLengthExceeded."""
        check(sequences, self.model_info)

    def add(
        self, sequences: list[Sequence], on_step: Callable[[list[Sequence]], None] | None = None
    ) -> Future[list[Sequence]]:
        """Run sequences as one group. The future gives the same objects when all are done, or an EngineError.

        `on_step` is called with the sequences that have new entries, after each step that gave them some. The last call
        comes before the future is done; one more may come after `cancel`. `on_step` and the future's callbacks run on
        the MLX thread and hold it up.

        Raises InvalidRequest or ContextLengthExceeded if a sequence asks for what the model cannot do, EngineClosed or
        EngineDeadError if the engine has ended.
        """
        self.check(sequences)
        group = Group(sequences, Future(), on_step)
        with self._changed:
            self._refuse_if_ended()
            self._arrivals.append(group)
            self.resident.note_work(self.resident.is_computing, True, time.monotonic())
            self._changed.notify()
        return group.future

    def cancel(self, future: Future[list[Sequence]]) -> None:
        """Take a group out of the batch before the next step. A group that is done stays as it is."""
        if future.cancel():
            with self._changed:
                self._has_canceled = True
                self._changed.notify()

    def control(self, message: ControlMessage[T]) -> Future[T]:
        """Apply a control message between two steps. The future gives its result, or what it raised.

        Messages are applied in order. The future's callbacks run on the MLX thread; do not wait for the future there.
        Raises EngineClosed or EngineDeadError if the engine has ended; the future gets the same if it ends before.
        """
        call = ControlCall(message, Future())
        with self._changed:
            self._refuse_if_ended()
            self._control_calls.append(call)
            if isinstance(message, NEED_WEIGHTS):
                self.resident.note_work(self.resident.is_computing, True, time.monotonic())
            self._changed.notify()
        return call.future

    def clear_prefix_cache(self) -> Future[int]:
        """Drop the KV caches of all shared prompts. The future gives the number of bytes freed."""
        return self.control(ClearPrefixCache())

    def drop_weights(self) -> Future[None]:
        """Free the memory of weights and caches, unless there is a group; the next group loads them again.

        If that fails, or the weights are others now, the engine ends with ReloadError.
        """
        return self.control(DropWeights())

    def stage_weights(self, folder: str, version: int) -> Future[ModelInfo]:
        """Load and check weights of the same architecture from a folder, beside those that serve.

        The future gets a LoadError for weights that do not fit; those before go on serving. Steps wait meanwhile.
        """
        return self.control(StageWeights(folder, version))

    def switch_weights(self, *, restart: bool = False) -> Future[Future[ModelInfo]]:
        """Let the staged weights serve. The future gives another, which is done once they do.

        Groups that have begun end on the weights before, or with `restart` begin anew; no group mixes two.
        """
        return self.control(BeginSwitch(restart))

    def discard_staged(self) -> Future[None]:
        """Drop weights that were staged."""
        return self.control(DiscardStaged())

    def load_adapter(self, name: str, folder: str) -> Future[Adapter]:
        """Load a LoRA adapter, which sequences can name from then on. The future gives it, or an AdapterError.

        It replaces one of the same name. Sequences that have the other go on with it.
        """
        return self.control(LoadAdapter(name, folder))

    def model_info_of(self, adapter_name: str | None) -> ModelInfo:
        """Return the model with the adapter that the name stands for now."""
        if adapter_name is None:
            return self.model_info
        label = next((each.label for each in self.adapters if each.name == adapter_name), adapter_name)
        return replace(self.model_info, adapter=label)

    def unload_adapter(self, name: str) -> Future[Adapter | None]:
        """Take an adapter away from new sequences. The future gives it; None if there was none of the name."""
        return self.control(UnloadAdapter(name))

    def close(self) -> None:
        """End after the running step; groups that are not done get EngineClosed. Do not call it on the MLX thread."""
        atexit.unregister(self.close)
        with self._changed:
            self._ended = self._ended or EngineClosed("the engine was closed")
            self._changed.notify()
        self._returned.wait()

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(self._ended.message)

    def _main(self, open_runner: Callable[[EngineSettings], Runner], ready: Future[None]) -> Turns:
        """Load the model, serve it, and end the groups and messages that still wait. Runs on the MLX thread."""
        self._memory.make_room()
        started_at = time.monotonic()
        try:
            core = EngineCore(open_runner, self._settings)
            for name, folder in self._settings.adapters:
                LoadAdapter(name, folder).apply(core)
        except AdapterError as error:
            ready.set_exception(LoadError(error.message))
            return
        except EngineError as error:
            log.debug("the model cannot be loaded", exc_info=True)
            ready.set_exception(error)
            return
        self.model_info, self.tokenizer, self.chat = core.runner.model_info, core.runner.tokenizer, core.runner.chat
        self.adapters = core.adapters.served
        self._memory.join(partial(self._drop_for_another, core), time.monotonic() - started_at)
        ready.set_result(None)
        try:
            yield from self._serve(core)
        except ReloadError as error:
            log.error("the engine ends: %s", error.message)
            self._end(core, error)
        except BaseException as error:
            log.exception("the engine failed in a step with %d groups", len(core.groups))
            self._end(core, EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
        else:
            self._end(core, EngineClosed("the engine was closed"))
            if self._settings.ranks > 1:
                core.runner.close()  # the other ranks end

    def _serve(self, core: EngineCore) -> Turns:
        """Take groups and control messages from callers and run a step in each turn, until the engine is closed."""
        while True:
            is_alone = yield partial(self._has_work, core)
            if self._ended is not None:
                return
            self.step_started_at = time.monotonic()
            self._take_arrivals(core)
            self._run_control_calls(core)
            if core.has_work and not core.is_loaded:
                self._load_weights(core)
            core.step(may_wait=is_alone)
            busy_s = core.stats.busy_s + time.monotonic() - self.step_started_at
            core.stats = replace(core.stats, busy_s=busy_s, prefixes=core.prefix_stats)
            self.load, self.stats, self.model_info = core.load, core.stats, core.runner.model_info
            self._note_loaded(core)
            self.step_started_at = None
            self._note_work(core)

    def _has_work(self, core: EngineCore) -> bool:
        """True if there is something to do in a turn, or the engine must end. Called with the lock."""
        may_begin = bool(self._arrivals) and not self.has_to_wait
        return bool(core.has_work or may_begin or self._may_apply(core) or self._has_canceled or self._ended)

    def _may_apply(self, core: EngineCore) -> bool:
        """True if there is a control message, and memory for the weights if it needs them.

        Rows decode on until the background has ended, and nothing new begins there.
        """
        core.starts_background = not self._control_calls
        if core.starts_background or core.is_background_busy:
            return False
        needs_weights = isinstance(self._control_calls[0].message, NEED_WEIGHTS)
        return core.is_loaded or not needs_weights or not self.has_to_wait

    def _note_work(self, core: EngineCore) -> None:
        """Tell the models that share the memory whether this one has work."""
        with self._changed:
            needs_weights = any(isinstance(call.message, NEED_WEIGHTS) for call in self._control_calls)
            has_work = core.is_busy or bool(self._arrivals) or needs_weights
            self.resident.note_work(core.is_busy, has_work, time.monotonic())

    def _take_arrivals(self, core: EngineCore) -> None:
        """Add new groups to the core if there is memory for the weights, and drop canceled ones."""
        with self._changed:
            may_begin = not self.has_to_wait
            # Cleared before the futures are checked, so that a cancellation during the check wakes the loop again.
            has_canceled, self._has_canceled = self._has_canceled, False
            arrived = [group for group in self._arrivals if may_begin or group.future.cancelled()]
            for group in arrived:
                self._arrivals.remove(group)
        for group in arrived:
            core.add(group)
        if has_canceled:
            core.drop_canceled()

    def _run_control_calls(self, core: EngineCore) -> None:
        """Apply the control messages that wait, while no step is in flight."""
        while self._may_apply(core):
            core.drain()
            self.step_started_at = None  # the watchdog times steps, and a message may take longer
            call = self._control_calls[0]  # it fails with the others if the weights cannot be loaded
            if isinstance(call.message, NEED_WEIGHTS) and not core.is_loaded:
                self._load_weights(core)
            if isinstance(call.message, StageWeights):  # a second copy, unless the first was dropped
                self._memory.make_room(self.model_info.weights_bytes if core.is_loaded else 0)
            self._control_calls.popleft()
            call.run(core)
            self.model_info, self.adapters = core.runner.model_info, core.adapters.served
            self.step_started_at = time.monotonic()

        if self.is_loaded and not core.is_loaded:
            log.info("idle: dropped the weights, %.0f MiB", self.model_info.weights_bytes / 2**20)
        self._note_loaded(core)

    def _load_weights(self, core: EngineCore) -> None:
        """Load weights that were dropped. Raises ReloadError."""
        self.step_started_at = None  # the watchdog times steps, and this may take longer
        self._memory.make_room()
        started_at = time.monotonic()
        core.load_weights()
        self.is_loaded, self.model_info = True, core.runner.model_info
        self.step_started_at = time.monotonic()
        self.resident.note_load(self.step_started_at, self.step_started_at - started_at)
        log.info("loaded the weights again in %.1f s", self.step_started_at - started_at)

    def _note_loaded(self, core: EngineCore) -> None:
        """Record whether the weights are loaded. A switch loads those of a model that had dropped them.

        If there is no room for it, because others compute, it drops them again.
        """
        if core.is_loaded and not self.resident.is_loaded:
            self._memory.make_room()
            if not self._memory.has_room:
                core.drop_weights()
            if core.is_loaded:
                self.resident.note_load(time.monotonic(), self.resident.load_s)
        self.is_loaded = self.resident.is_loaded = core.is_loaded

    def _drop_for_another(self, core: EngineCore) -> None:
        """Drop the weights, because another model needs the memory. They stay while something is computed."""
        core.drop_weights()
        if core.is_loaded:
            return
        self.is_loaded = self.resident.is_loaded = False
        self._note_work(core)
        log.info(
            "dropped the weights of %s, %.0f MiB: another model needs the memory",
            *(self._settings.model, self.model_info.weights_bytes / 2**20),
        )

    def _end(self, core: EngineCore, reason: EngineError) -> None:
        """Refuse new work, and end every group and message that waits."""
        with self._changed:
            self._ended = self._ended if isinstance(self._ended, EngineDeadError) else reason
            waiting: list[Group | ControlCall[Any] | WeightsSwitch]
            waiting = [*core.groups, *self._arrivals, *self._control_calls, *([core.switch] if core.switch else ())]
            self._arrivals.clear()
            self._control_calls.clear()
        self.step_started_at = None
        self._memory.leave()
        for one in waiting:
            one.fail(reason)
        core.drop_background()  # a process that ends while MLX computes is aborted
