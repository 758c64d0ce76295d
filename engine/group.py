"""What the core of the engine ends with a result or an error: groups of sequences, and the switch to other weights."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from scorepool.engine.errors import EngineError
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.sequence import Sequence


@dataclass(eq=False, slots=True)
class Group:
    """The sequences of one `Engine.add`."""

    sequences: list[Sequence]
    future: Future[list[Sequence]]
    on_step: Callable[[list[Sequence]], None] | None

    @property
    def has_begun(self) -> bool:
        """True if a part of it was computed, or is in flight."""
        return any(sequence.has_begun for sequence in self.sequences)

    def fail(self, error: EngineError) -> None:
        """End the future with an error, unless it was canceled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class WeightsSwitch:
    """The staged weights are to serve once no group is left that the present ones have begun."""

    future: Future[ModelInfo]
    held: list[Group] = field(default_factory=list)  # groups that begin after the switch

    def fail(self, error: EngineError) -> None:
        """End the future with an error, unless it was canceled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
