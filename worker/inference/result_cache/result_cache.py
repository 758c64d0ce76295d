"""Compute sequences once: give values from Redis, or those of a sequence that runs now; add the others to the engine.

    add ──► a sequence that asks for the same runs ──► wait for its values ───────────────┐
       └──► look up in Redis ──► found ──────────────────────────────────────────────────┤
                            └──► engine.add ──► computed ──► written to Redis, forgotten ─┴──► the group's future

A sequence that others wait for is led by its group. If that is canceled or fails, the next that waits is computed. So
nobody waits for what nobody computes; after the death of the worker, all its jobs run elsewhere. Groups wait only for
groups that came before them, so none waits for another in a ring.

No group mixes the values of two models: if the weights changed meanwhile, all its sequences are computed again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import RLock

from scorepool.engine import Engine, EngineError, ModelInfo, Sequence
from scorepool.wire import CachedSequence
from scorepool.worker.inference.result_cache.cache_store import CacheStore, Found, Write
from scorepool.worker.inference.result_cache.digest import digests, identity_of
from scorepool.worker.inference.result_cache.entry import copy_unbegun, fill_from_entry, fill_from_sequence, to_entry


@dataclass(eq=False, slots=True)
class CachedGroup:
    """The sequences of one `ResultCache.add`."""

    sequences: list[Sequence]
    info: ModelInfo  # whose values are looked up
    future: Future[list[Sequence]] = field(default_factory=Future)
    cached: set[Sequence] = field(default_factory=set)  # those that were not computed for this group
    num_open: int = 0  # sequences that have no values yet
    added: list[Future[list[Sequence]]] = field(default_factory=list)  # in the engine
    waits_for: list[Sequence] = field(default_factory=list)  # sequences of other groups, or of this one
    leads: set[bytes] = field(default_factory=set)  # digests of the sequences that others may wait for
    is_over: bool = False

    def has_begun(self) -> bool:
        """True if a part of what it needs has been computed."""
        return self.future.done() or any(one.has_begun for one in (*self.sequences, *self.waits_for))


Portion = tuple[CachedGroup, list[Sequence], dict[bytes, Sequence]]  # to compute; of the kept ones also by digest


@dataclass(eq=False, slots=True)
class Running:
    """A sequence that is looked up, computed or written now, and those that wait for its values."""

    group: CachedGroup
    sequence: Sequence
    waiting: list[tuple[CachedGroup, Sequence]] = field(default_factory=list)
    is_computed: bool = False


class ResultCache:
    """The way of sequences to the engine, past what need not be computed again. Any thread may call it."""

    def __init__(self, engine: Engine, store: CacheStore) -> None:
        self._engine = engine
        self._store = store
        # Guards everything below, and the groups. No future is ended under it: callbacks run other code.
        self._lock = RLock()
        self._running: dict[bytes, Running] = {}

    def add(self, sequences: list[Sequence], owner: str, cache_salt: str | None) -> CachedGroup:
        """Give each sequence its values. The group's future ends as that of `Engine.add` does. Raises EngineError."""
        self._engine.check(sequences)
        info = self._engine.model_info_of(sequences[0].adapter_name)
        group = CachedGroup(sequences, info, num_open=len(sequences))
        keys = list(digests(sequences, group.info, owner, cache_salt))
        to_compute: list[Sequence] = []
        to_look_up: dict[bytes, Sequence] = {}
        num_shared = 0
        with self._lock:
            for sequence, key in zip(sequences, keys, strict=True):
                if key is None:
                    to_compute.append(sequence)
                elif running := self._running.get(key):
                    num_shared += 1
                    self._wait_for(running, group, sequence)
                else:
                    self._running[key] = Running(group, sequence)
                    group.leads.add(key)
                    to_look_up[key] = sequence
        if num_shared:
            self._store.count("shared", num_shared)
        if to_look_up:
            self._store.look_up(list(to_look_up), partial(self._on_found, group, to_compute, to_look_up))
        elif to_compute:
            self._compute_all([(group, to_compute, {})])
        self._end_if_complete(group)
        return group

    def cancel(self, group: CachedGroup) -> None:
        """Take a group out. What others wait for is computed for them."""
        with self._lock:
            group.is_over = True
            added = list(group.added)
        for future in added:
            self._engine.cancel(future)
        group.future.cancel()
        self._compute_all(self._heirs(group, group.leads))

    def close(self) -> None:
        """Write what waits to be written."""
        self._store.close()

    def _wait_for(self, running: Running, group: CachedGroup, sequence: Sequence) -> None:
        """Give a sequence the values of one that runs, now or later. Called under the lock."""
        group.cached.add(sequence)
        if running.is_computed:
            fill_from_sequence(sequence, running.sequence)
            group.num_open -= 1
        else:
            group.waits_for.append(running.sequence)
            running.waiting.append((group, sequence))

    def _on_found(
        self, group: CachedGroup, to_compute: list[Sequence], looked_up: dict[bytes, Sequence], found: Found
    ) -> None:
        """Use what Redis has, and compute the rest. Raises nothing."""
        missing: dict[bytes, Sequence] = {}
        touched = {group}
        with self._lock:
            for (key, sequence), entry in zip(looked_up.items(), found, strict=True):
                if entry is None or not _fill(sequence, entry, group.info):
                    missing[key] = sequence
                    continue
                group.cached.add(sequence)
                group.num_open -= 1
                running = self._running.get(key)
                if running is not None and running.sequence is sequence:  # else the group was canceled meanwhile
                    del self._running[key]
                    touched |= self._give(running)
        self._store.count("hits", len(looked_up) - len(missing))
        self._store.count("misses", len(missing))
        if to_compute or missing:
            self._compute_all([(group, [*to_compute, *missing.values()], missing)])
        for one in touched:
            self._end_if_complete(one)

    def _give(self, running: Running) -> set[CachedGroup]:
        """Give the values of a sequence to those that wait for it; return their groups. Called under the lock."""
        running.is_computed = True
        waiting, running.waiting = running.waiting, []
        for group, sequence in waiting:
            fill_from_sequence(sequence, running.sequence)
            group.num_open -= 1
        return {group for group, _ in waiting}

    def _compute_all(self, waiting: Iterable[Portion]) -> None:
        """Add portions to the engine. If it refuses one, its group ends with the error. Raises nothing."""
        portions = deque(waiting)
        while portions:
            group, sequences, keys = portions.popleft()
            try:
                added = self._add_to_engine(group, sequences)
            except EngineError as error:
                portions += self._end_with(group, error)
                continue
            if added is None:
                portions += self._heirs(group, group.leads)
            else:
                added.add_done_callback(partial(self._on_computed, group, sequences, keys))

    def _add_to_engine(self, group: CachedGroup, sequences: list[Sequence]) -> "Future[list[Sequence]] | None":
        """Add sequences to the engine, unless their group is over. Raises EngineError."""
        with self._lock:
            if group.is_over:
                return None
            group.added.append(self._engine.add(sequences))
            return group.added[-1]

    def _on_computed(
        self,
        group: CachedGroup,
        sequences: list[Sequence],
        keys: dict[bytes, Sequence],
        added: "Future[list[Sequence]]",
    ) -> None:
        """Take what the engine computed. Runs on its thread."""
        if added.cancelled():
            return
        if error := added.exception():
            if isinstance(error, EngineError) and error.index is not None:
                error.index = group.sequences.index(sequences[error.index])
            self._compute_all(self._end_with(group, error))
            return
        touched = {group}
        writes = []
        with self._lock:
            group.num_open -= len(sequences)
            for key, sequence in keys.items():
                running = self._running.get(key)
                if running is None or running.sequence is not sequence or sequence.error is not None:
                    continue
                touched |= self._give(running)
                if self._is_of(sequence, group.info):
                    writes.append(Write(key, partial(to_entry, key, sequence), partial(self._forget, key, running)))
                else:
                    del self._running[key]
        self._store.write(writes)
        self._compute_all(self._heirs(group, [key for key, each in keys.items() if each.error is not None]))
        for one in touched:
            self._end_if_complete(one)

    @staticmethod
    def _is_of(sequence: Sequence, info: ModelInfo) -> bool:
        """True if the model computed the sequence."""
        found = sequence.model_info
        return found is info or (found is not None and identity_of(found) == identity_of(info))

    def _forget(self, key: bytes, running: Running) -> None:
        """Forget a sequence that Redis has."""
        with self._lock:
            if self._running.get(key) is running:
                del self._running[key]

    def _end_if_complete(self, group: CachedGroup) -> None:
        """End a group whose sequences all have values: of one model, or they are computed again together."""
        with self._lock:
            if group.num_open or group.is_over:
                return
            group.is_over = True
        first = next((one.model_info for one in group.sequences if one.error is None), None)
        if first is None or all(are_alike(one.model_info, first) for one in group.sequences if one.error is None):
            _end(group.future, lambda: group.future.set_result(group.sequences))
            return
        again = [copy_unbegun(sequence) for sequence in group.sequences]
        try:
            with self._lock:
                if group.future.cancelled():
                    return
                added = self._engine.add(again)
                group.added.append(added)
        except EngineError as error:
            _end(group.future, partial(group.future.set_exception, error))
        else:
            added.add_done_callback(partial(self._on_computed_again, group, again))

    def _on_computed_again(self, group: CachedGroup, again: list[Sequence], added: "Future[list[Sequence]]") -> None:
        if added.cancelled():
            return
        if error := added.exception():
            _end(group.future, partial(group.future.set_exception, error))
            return
        group.cached.clear()
        for sequence, computed in zip(group.sequences, again, strict=True):
            fill_from_sequence(sequence, computed)
        _end(group.future, lambda: group.future.set_result(group.sequences))

    def _end_with(self, group: CachedGroup, error: BaseException) -> list[Portion]:
        """End a group with an error; return what must be computed for others instead."""
        with self._lock:
            was_over, group.is_over = group.is_over, True
            added = list(group.added)
        for future in added:
            if not future.done():
                self._engine.cancel(future)
        heirs = self._heirs(group, group.leads)
        if not was_over:
            _end(group.future, partial(group.future.set_exception, error))
        return heirs

    def _heirs(self, group: CachedGroup, keys: Iterable[bytes]) -> list[Portion]:
        """Return what others wait for and this group does not compute any more, each for the first that waits."""
        heirs: list[Portion] = []
        with self._lock:
            for key in list(keys):
                running = self._running.get(key)
                if running is None or running.group is not group or running.is_computed:
                    continue
                waiting = [(one, sequence) for one, sequence in running.waiting if not one.is_over]
                if not waiting:
                    del self._running[key]
                    continue
                (heir, sequence), *rest = waiting
                self._running[key] = Running(heir, sequence, rest)
                heir.cached.discard(sequence)
                heir.leads.add(key)
                for one, _ in rest:
                    one.waits_for.append(sequence)
                heirs.append((heir, [sequence], {key: sequence}))
        return heirs


def are_alike(one: ModelInfo | None, other: ModelInfo) -> bool:
    """True if values of both may stand in one result: of the same version of the same weights."""
    if one is other or one is None:
        return one is other
    return identity_of(one) == identity_of(other) and one.weights_version == other.weights_version


def _fill(sequence: Sequence, entry: CachedSequence, info: ModelInfo) -> bool:
    """Give an entry's values to a sequence; return whether they fit."""
    try:
        fill_from_entry(sequence, entry, info)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _end(future: "Future[list[Sequence]]", end: Callable[[], object]) -> None:
    """End a future, unless it was canceled."""
    if future.set_running_or_notify_cancel():
        end()
