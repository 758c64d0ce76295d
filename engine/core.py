"""The core of the engine, used on the MLX thread only: groups of sequences, and the steps that compute them.

    add ──► scheduler ──schedule──► runner.launch ┄┄ runner.read ──► commit ──► Future

Knows no tensors (runner.py, model/runner.py), and no other thread (engine.py).
"""

import gc
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from scorepool.engine.adapter_table import AdapterTable
from scorepool.engine.errors import EngineError, LoadError, ReloadError, UnknownAdapter, WeightsReplaced, as_load_error
from scorepool.engine.group import Group, WeightsSwitch
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.runner import BackgroundJob, Runner
from scorepool.engine.scheduling.kv_budget import KVBudget
from scorepool.engine.scheduling.prefill_pace import PrefillPace
from scorepool.engine.scheduling.prefix_cache import PrefixCache
from scorepool.engine.scheduling.prefix_stats import PrefixCounts, PrefixStats
from scorepool.engine.scheduling.prompt_selection import PromptSelection, selects
from scorepool.engine.scheduling.proposals import ChosenSource, DraftSource, NgramSource, ProposalSource
from scorepool.engine.scheduling.scheduler import SHARE_BESIDE_DECODING, Background, Scheduler
from scorepool.engine.scheduling.slice import SchedulerOutput, SliceResult
from scorepool.engine.scheduling.speculator import Speculator
from scorepool.engine.scheduling.stats import EngineStats
from scorepool.engine.sequence import Sequence
from scorepool.engine.settings import EngineSettings

IDLE_S = 0.01  # for which new sequences may wait while all others are paused


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and not read yet."""

    output: SchedulerOutput
    handle: Any  # the runner's
    began_at: float  # time.monotonic() before it was scheduled
    launched_at: float


class EngineCore:
    """The loop body of the engine: schedule, run and commit steps. Must be used on the MLX thread."""

    def __init__(self, open_runner: Callable[[EngineSettings], Runner], settings: EngineSettings) -> None:
        """Load the model, and start without sequences. Raises LoadError."""
        self._open_runner = open_runner
        self._settings = settings
        self.runner = runner = self._open(settings)
        self.is_loaded = True
        self._staged: tuple[EngineSettings, Runner] | None = None  # weights that may replace the present ones
        self.switch: WeightsSwitch | None = None
        self._share = 1.0
        self._prefix_counts = PrefixCounts()
        self._start_scheduling(runner)
        self.adapters = AdapterTable()
        self._adapter_bytes = 0  # in the weights' bytes of the model's info
        self._groups: dict[Sequence, Group] = {}
        self._selection = PromptSelection(lambda: self.runner.prompt_scorer)
        self._has_selected = False  # since the last step was read
        self._launched: InFlightStep | None = None
        self._background: BackgroundJob | None = None
        self.starts_background = True  # False while something waits for it to end
        self._read_at = 0.0  # time.monotonic() when the last step was read
        self.stats = EngineStats()

    @property
    def has_work(self) -> bool:
        """True if `step` has something to launch or to read."""
        is_computing = self._launched is not None or self._background is not None
        return is_computing or self.scheduler.has_work or self._selection.has_work

    @property
    def is_busy(self) -> bool:
        """True if there is a group, a step in flight, or a switch to other weights that waits."""
        return bool(self._groups) or self.has_work or self.switch is not None

    @property
    def groups(self) -> list[Group]:
        """All groups that are not done: those that may run in order of arrival, then those that a switch holds."""
        return list(dict.fromkeys([*self._groups.values(), *(self.switch.held if self.switch else ())]))

    @property
    def load(self) -> tuple[int, int]:
        """The rows that generate, and the tokens of all KV caches: rows times the longest, and a prompt half way."""
        running = self.scheduler.running
        rows = [sequence.num_computed for sequence in running if sequence.sampling is not None]
        beside = sum(sequence.num_computed for sequence in running if sequence.sampling is None)
        return len(rows), len(rows) * max(rows, default=0) + beside

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache counts."""
        return PrefixStats() if self.prefix_cache is None else self.prefix_cache.stats

    def add(self, group: Group) -> None:
        """Append a group to those that wait; fail it if an adapter that it names is not loaded."""
        if self.switch is not None:
            self.switch.held.append(group)
            return
        try:
            self.adapters.assign(group.sequences)
        except UnknownAdapter as error:
            group.fail(error)
            return
        for sequence in group.sequences:
            self._groups[sequence] = group
            if sequence.score_from == 0:
                sequence.append_unpredicted()
            if sequence.classify and (classifier := self.runner.model_info.classifier):
                sequence.pool_before_padding(classifier.pad_id)
        unfinished = [sequence for sequence in group.sequences if not sequence.is_done]
        for sequence in unfinished:
            if selects(sequence):
                self._selection.add(sequence)
            else:
                self.scheduler.add([sequence])
        if not unfinished:
            self._resolve(group)

    def drop_canceled(self) -> None:
        """Take canceled groups out of the batch."""
        canceled = [group for group in self.groups if group.future.cancelled()]
        self._forget([sequence for group in canceled for sequence in group.sequences])
        if self.switch is not None:
            self.switch.held = [group for group in self.switch.held if group not in canceled]
        for group in canceled:  # last, because a future that was notified cannot be failed if `_forget` raises
            group.future.set_running_or_notify_cancel()
        self._switch_if_ready()

    def step(self, may_wait: bool = True) -> None:
        """Schedule and launch a step, then commit the step before it, so that neither host nor device waits.

        Where the next step depends on the tokens of the step before, that is committed first. `may_wait`: sleep for a
        moment if there is nothing to compute.
        """
        if self.scheduler.awaits_commit:
            self._drain_steps()
        began_at = time.monotonic()
        output = self.scheduler.schedule(self._launched is None, self._background_state)
        previous, self._launched = self._launched, self._launch(output, began_at)
        self._commit(previous)
        is_idle = output.is_empty and previous is None and not self._selection.has_work and may_wait
        self._commit_background(waits=is_idle and not self.scheduler.paused)
        if self._selection.has_work:
            self.scheduler.add(self._selection.advance())
            self._has_selected = True
        elif is_idle:
            self._wait_for_paused()
        if self.prefix_cache is not None and not self.has_work:
            self.prefix_cache.store_one()
        self._switch_if_ready()

    def set_budget(self, share: float) -> None:
        """Schedule with a share of the settings' tokens and rows, at least one of each."""
        self._share = share
        rows = max(1, int(self._settings.max_running_rows * share))
        self.scheduler.max_batch_tokens = max(1, int(self._settings.max_batch_tokens * share))
        self.scheduler.kv_budget = KVBudget(rows, self.scheduler.kv_budget.max_cached_tokens)

    def set_memory(self, memory_bytes: int, prefix_cache_bytes: int) -> None:
        """Change the room for caches: none is left if `max_cached_tokens` of the model is 0 afterwards."""
        self._settings = settings = replace(
            self._settings, memory_bytes=memory_bytes, prefix_cache_bytes=prefix_cache_bytes
        )
        info = self.runner.model_info
        spare = memory_bytes - info.weights_bytes - prefix_cache_bytes
        tokens = info.cache_sizes.max_tokens(spare, settings.max_running_rows)
        self.runner.model_info = replace(info, memory_bytes=memory_bytes, max_cached_tokens=tokens)
        self._fit_kv_budget()
        if self.prefix_cache is not None:
            self.prefix_cache.max_bytes = prefix_cache_bytes

    def _fit_kv_budget(self) -> None:
        """Let KV caches take what the memory leaves beside the weights, and beside those that are staged."""
        info, settings = self.runner.model_info, self._settings
        tokens = info.max_cached_tokens
        if self._staged is not None and info.cache_sizes.bytes_per_token:
            taken = info.weights_bytes + self._staged[1].model_info.weights_bytes + settings.prefix_cache_bytes
            tokens = info.cache_sizes.max_tokens(info.memory_bytes - taken, settings.max_running_rows)
        self.scheduler.kv_budget = KVBudget(self.scheduler.kv_budget.max_running, tokens)

    def drop_weights(self) -> None:
        """Drop the weights and all caches, unless there is a group, or other ranks have a share of the weights."""
        if not self.is_loaded or self.is_busy or self._settings.ranks > 1:
            return
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        self.runner.close()
        self.is_loaded = False

    def load_weights(self) -> None:
        """Load weights that were dropped. Raises ReloadError."""
        closed = self.runner
        try:
            runner = self._open(self._settings)
        except LoadError as error:
            raise ReloadError(f"the weights cannot be loaded again: {error.message}") from error
        if changes := closed.model_info.changes_to(runner.model_info):
            raise ReloadError(
                f"the model {self._settings.model!r} changed while its weights were dropped: {', '.join(changes)}"
            )
        runner.tokenizer, runner.chat = closed.tokenizer, closed.chat  # those that the callers use
        self.runner = runner
        self.is_loaded = True
        if self.prefix_cache is not None:
            self.prefix_cache.store = runner.prefix_store
        self._move_adapters(closed)

    def stage_weights(self, folder: str, version: int) -> ModelInfo:
        """Load weights from a folder, beside the present ones, and check them. Raises LoadError.

        What was staged before is dropped.
        """
        if self._settings.ranks > 1:
            raise LoadError(
                f"the model is shared by {self._settings.ranks} ranks, which load their weights at their start only: "
                "start them anew with the new weights"
            )
        self.discard_staged()
        settings = replace(self._settings, weights_folder=folder, weights_version=version, tries_load=False)
        try:
            runner = self._open(settings)
        except LoadError:
            gc.collect()  # tracebacks and modules refer to each other
            raise
        new_info = runner.model_info
        present = self.runner.model_info
        if changes := present.changes_to(replace(new_info, fingerprint=present.fingerprint)):
            runner.close()
            raise LoadError(f"the weights would be computed in another way than those before: {', '.join(changes)}")
        self._staged = settings, runner
        self._fit_kv_budget()
        return new_info

    def discard_staged(self) -> None:
        """Drop weights that were staged, unless they are about to serve."""
        if self._staged is not None and self.switch is None:
            staged, self._staged = self._staged, None
            staged[1].close()
            self._fit_kv_budget()

    def begin_switch(self, restart: bool) -> Future[ModelInfo]:
        """Let the staged weights serve once no group is left that the present ones have begun. Raises LoadError.

        Groups that have not begun wait for it. `restart` lets the others begin anew, so that nothing is waited for;
        one with `on_step`, which was told of tokens that are gone now, ends with WeightsReplaced instead.
        """
        if self._staged is None or self.switch is not None:
            raise LoadError("no weights are staged")
        waiting = [group for group in self.groups if not group.has_begun]
        running = [group for group in self.groups if group.has_begun and restart]
        sequences = [sequence for group in (*waiting, *running) for sequence in group.sequences]
        resumed = [group for group in running if group.on_step is None]
        self.switch = switch = WeightsSwitch(Future(), [*resumed, *waiting])
        self._forget(sequences)
        for sequence in sequences:
            sequence.restart()
        for group in running:
            if group.on_step is not None:
                group.fail(WeightsReplaced("other weights serve from now on; add the group again"))
        self._switch_if_ready()
        return switch.future

    def _switch_if_ready(self) -> None:
        """Replace the model, if that was asked for and no group is left that the present one has begun."""
        if self.switch is None or self._staged is None or self._groups:
            return
        self.drain()
        (settings, runner), self._staged = self._staged, None
        runner.tokenizer, runner.chat = self.runner.tokenizer, self.runner.chat  # those that the callers use
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        if self.is_loaded:
            self.runner.close()
        closed, self.runner, self._settings, self.is_loaded = self.runner, runner, settings, True
        self._start_scheduling(runner)
        self._move_adapters(closed)
        switch, self.switch = self.switch, None  # not before: whoever ends the engine after a fault finds the groups
        for group in switch.held:
            self.add(group)
        if switch.future.set_running_or_notify_cancel():
            switch.future.set_result(runner.model_info)

    def _start_scheduling(self, runner: Runner) -> None:
        """Begin with an empty scheduler and an empty prefix cache."""
        settings = self._settings
        self.prefix_cache = None
        if runner.can_share:
            self.prefix_cache = PrefixCache(
                settings.prefix_cache_bytes, store=runner.prefix_store, counts=self._prefix_counts
            )
        kv_budget = KVBudget(settings.max_running_rows, runner.model_info.max_cached_tokens)
        pace = PrefillPace(settings.prefill_ms / 1000, settings.max_batch_tokens // SHARE_BESIDE_DECODING)
        self.scheduler = Scheduler(
            settings.max_batch_tokens, kv_budget, self.prefix_cache, self._new_speculator(), pace
        )
        self.set_budget(self._share)

    def _open(self, settings: EngineSettings) -> Runner:
        with as_load_error(f"the model {settings.model!r} cannot be loaded"):
            return self._open_runner(settings)

    def drain(self) -> None:
        """Commit the launched step and what is computed in the background, so that nothing is in flight."""
        self._drain_steps()
        self._commit_background(waits=True)

    def _drain_steps(self) -> None:
        previous, self._launched = self._launched, None
        self._commit(previous)

    def _new_speculator(self) -> Speculator | None:
        if self._settings.speculation == "off" or not self.runner.can_speculate:
            return None
        max_width = self._settings.speculation_tokens
        source: ProposalSource = NgramSource()
        if self.runner.draft is not None:
            drafts = DraftSource(lambda: self.runner.draft, max_width)
            source = ChosenSource({"ngram": source, self._settings.speculation: drafts}, self._settings.speculation)
        usual = "ngram" if self.runner.draft is None else self._settings.speculation
        return Speculator(source, max_width, lambda position: self.runner.max_proposed(position), usual)

    def _launch(self, output: SchedulerOutput, began_at: float) -> InFlightStep | None:
        if output.is_empty:
            return None
        if output.background:
            self._background = self.runner.launch_background(output.background)
        launched, paused = self.runner.launch(output)
        limits = self.scheduler.max_batch_tokens, self.scheduler.kv_budget.max_running
        self.stats = self.stats.after(output, len(paused), *limits)
        self.scheduler.pause(paused)
        self.runner.release([sequence for sequence in output.leaving if sequence not in paused])
        return InFlightStep(output, launched, began_at, time.monotonic())

    @property
    def is_background_busy(self) -> bool:
        """True if something is computed in the background."""
        return self._background is not None and not self._background.done()

    @property
    def _background_state(self) -> Background:
        if self._background is not None or not self.starts_background:
            return "busy"
        # Slow steps are products of matrices, which have no core to spare.
        return "free" if self.runner.has_background and self.scheduler.pace.decodes_fast else "none"

    def _commit_background(self, waits: bool) -> None:
        """Commit what was computed in the background, if it is ready or is waited for."""
        if self._background is None or not (waits or self._background.done()):
            return
        computed, self._background = self._background, None
        self._commit_results(self.runner.read(computed.result()))

    def drop_background(self) -> None:
        """Wait until nothing is computed in the background, and drop what was."""
        if self._background is not None:
            with suppress(BaseException):  # what has ended the engine already is known
                self._background.result()
            self._background = None

    def _wait_for_paused(self) -> None:
        """Sleep for a moment if there is nothing to do but to wait for constraints."""
        for sequence in self.scheduler.paused:
            if sequence.constraint is not None:
                sequence.constraint.wait(IDLE_S)
                return

    def _commit(self, launched: InFlightStep | None) -> None:
        """Read a step, and do what follows from its results."""
        if launched is None:
            return
        waits_from = time.monotonic()
        results = self.runner.read(launched.handle)
        self._record_cost(launched, waits_from)
        self._commit_results(results)

    def _commit_results(self, results: list[SliceResult]) -> None:
        """End the groups that are done or failed, and call `on_step` of those with new entries."""
        self.stats = self.stats.after_read(results)
        for result in results:
            if result.error is not None:
                self._fail(result.slice.sequence, result.error)
        self.runner.release(self.scheduler.commit(results))
        changed: dict[Group, list[Sequence]] = {}
        for result in results:
            if group := self._groups.get(result.slice.sequence):
                changed.setdefault(group, []).append(result.slice.sequence)
        for group, sequences in changed.items():
            if group.on_step is not None:
                for sequence in sequences:
                    if sequence.model_info is None:
                        sequence.model_info = self._model_info_of(sequence)
                group.on_step(sequences)
            if all(sequence.is_done for sequence in group.sequences):
                self._resolve(group)

    def _record_cost(self, step: InFlightStep, waits_from: float) -> None:
        """Tell the scheduler how long a step took that was just read, and from when on it was waited for."""
        now = time.monotonic()
        output, pace, seconds = step.output, self.scheduler.pace, now - max(step.began_at, self._read_at)
        self._read_at = now
        has_selected, self._has_selected = self._has_selected, False  # then the draft model took a part of the time
        if output.decodes:
            num_next = self._launched.output.num_prefilled if self._launched else 0
            pace.record(output.num_prefilled, None if has_selected else seconds, num_next)
        elif output.num_prefilled and not has_selected:
            pace.record_prefill(output.num_prefilled, seconds)
        if output.decodes and self.scheduler.speculator and not has_selected:
            seconds = step.launched_at - step.began_at + now - waits_from  # without the launch of the step after it
            self.scheduler.speculator.record_cost(output, seconds)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        """End a sequence that cannot continue, with its group unless it fails alone. It may have ended already."""
        if group := self._groups.get(sequence):
            error.index = group.sequences.index(sequence)
            if sequence.fails_alone:
                sequence.error = error
                self.runner.release(self.scheduler.remove([sequence]))
                return
            self._forget(group.sequences)
            group.fail(error)

    def _resolve(self, group: Group) -> None:
        """Give a group its result, computed by the model that is loaded now."""
        for sequence in group.sequences:
            sequence.model_info = self._model_info_of(sequence)
            del self._groups[sequence]
        self.drop_unused_adapters()
        if group.future.set_running_or_notify_cancel():
            group.future.set_result(group.sequences)

    def _forget(self, sequences: list[Sequence]) -> None:
        """Remove sequences from the batch."""
        if not sequences:
            return
        self._selection.remove(sequences)
        self.runner.release(self.scheduler.remove(sequences))
        for sequence in sequences:
            self._groups.pop(sequence, None)
        self.drop_unused_adapters()

    def _model_info_of(self, sequence: Sequence) -> ModelInfo:
        info = self.runner.model_info
        return info if sequence.adapter is None else replace(info, adapter=sequence.adapter.label)

    def drop_unused_adapters(self) -> None:
        """Drop the adapters that are served no more and that no sequence has. Adapters take room from KV caches."""
        chunked = self.scheduler.chunked_prefill
        held = [sequence for group in (self.switch.held if self.switch else ()) for sequence in group.sequences]
        unused = self.adapters.take_unused([*self._groups, *held, *([chunked.sequence] if chunked else [])])
        if unused:
            self.runner.drop_adapters(unused)
        for adapter in unused:
            if self.prefix_cache is not None:
                self.prefix_cache.forget_adapter(adapter)
        self._give_adapters_room()

    def _move_adapters(self, closed: Runner) -> None:
        """Give the model's runner the adapters of the closed one before it."""
        self._adapter_bytes = 0
        if not self.adapters.is_empty:
            self.runner.take_over_adapters(closed)
            self._give_adapters_room()

    def _give_adapters_room(self) -> None:
        """Let adapters take their memory from that of KV caches."""
        info, num_bytes = self.runner.model_info, self.runner.adapter_bytes if not self.adapters.is_empty else 0
        if num_bytes != self._adapter_bytes:
            added, self._adapter_bytes = num_bytes - self._adapter_bytes, num_bytes
            self.runner.model_info = replace(info, weights_bytes=info.weights_bytes + added)
            self.set_memory(info.memory_bytes, self._settings.prefix_cache_bytes)

    @property
    def max_adapter_bytes(self) -> int:
        """The most memory that all adapters may take: half of what the KV caches would have without them."""
        info, settings = self.runner.model_info, self._settings
        spare = info.memory_bytes - info.weights_bytes + self._adapter_bytes - settings.prefix_cache_bytes
        return max(0, spare) // 2
