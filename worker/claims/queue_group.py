"""Queues whose jobs are claimed together: those of one model. Each group has a plan, and claims of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rq.queue import Queue

from scorepool.store.clock import awake_s
from scorepool.worker.claims.claim_plan import ClaimPlan
from scorepool.worker.claims.leases import LeaseHolder

Held = TypeVar("Held", bound=LeaseHolder)


class QueueGroup:
    """Some queues of a worker, by name, and what it has and will claim of them. Used by the main thread."""

    def __init__(self, queue_names: Iterable[str]) -> None:
        self.queue_names = frozenset(queue_names)
        self.plan = ClaimPlan()
        self.num_wanted = 0  # at the last look
        self.idle_since = awake_s()  # the time since which none of its jobs has been in flight

    def of(self, jobs: Iterable[Held]) -> list[Held]:
        """Return those of the jobs that are of its queues."""
        return [job for job in jobs if job.queue.name in self.queue_names]

    def in_order(self, queues: Iterable[Queue]) -> list[Queue]:
        """Return those of the queues that are its own."""
        return [queue for queue in queues if queue.name in self.queue_names]


class QueueGroups:
    """The groups of a worker. They take turns to claim, so that none of them waits for another's empty queue."""

    def __init__(self, groups: Sequence[QueueGroup]) -> None:
        self._groups = list(groups)
        self._by_queue = {name: group for group in groups for name in group.queue_names}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueueGroup]:
        return iter(list(self._groups))

    def of_queue(self, name: str) -> QueueGroup:
        """Return the group of a queue."""
        return self._by_queue[name]

    def take_turn(self, is_due: Callable[[QueueGroup], bool]) -> QueueGroup | None:
        """Return the group that is due and claimed longest ago, and count it as claiming; None if none is due."""
        found = next((group for group in self._groups if is_due(group)), None)
        if found is not None:
            self._groups.remove(found)
            self._groups.append(found)
        return found
