"""Control messages: changes of the model or its caches, made between two steps on the MLX thread.

To add one, write a class with `apply`. An error that `apply` raises ends the message's future. EngineDeadError also
ends the engine: raise it if the model is left unusable.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scorepool.engine.core import EngineCore
from scorepool.engine.errors import EngineDeadError, EngineError
from scorepool.engine.model_info import ModelInfo

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ControlMessage(Protocol[T_co]):
    """A change to make between two steps."""

    def apply(self, core: EngineCore) -> T_co:
        """Make the change and return its result. Runs on the MLX thread while no step is in flight."""


@dataclass(frozen=True, slots=True)
class ClearPrefixCache:
    """Drop the KV caches of all shared prompts. The result is the number of bytes freed."""

    def apply(self, core: EngineCore) -> int:
        """Clear the prefix cache, if the model has one."""
        return 0 if core.prefix_cache is None else core.prefix_cache.clear()


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Drop the weights and all caches while the engine has no group; the next group loads them again."""

    def apply(self, core: EngineCore) -> None:
        """Drop the weights. With a group, do nothing."""
        core.drop_weights()


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Let steps use a share of the tokens and rows that the settings allow. What runs already goes on."""

    share: float  # above 0, at most 1

    def apply(self, core: EngineCore) -> None:
        """Change the limits of the next steps."""
        core.set_budget(self.share)


@dataclass(frozen=True, slots=True)
class SetMemory:
    """Let weights and caches take this memory. The engine must have no groups."""

    memory_bytes: int
    prefix_cache_bytes: int  # of them

    def apply(self, core: EngineCore) -> None:
        """Change the room for caches, now and when the weights are loaded again."""
        core.set_memory(self.memory_bytes, self.prefix_cache_bytes)


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Load and check other weights of the same architecture beside the present ones. The result describes them."""

    folder: str
    version: int

    def apply(self, core: EngineCore) -> ModelInfo:
        """Stage the weights. Raises LoadError, and what serves goes on."""
        return core.stage_weights(self.folder, self.version)


@dataclass(frozen=True, slots=True)
class DiscardStaged:
    """Drop weights that were staged."""

    def apply(self, core: EngineCore) -> None:
        """Drop them, unless a switch to them was begun."""
        core.discard_staged()


@dataclass(frozen=True, slots=True)
class BeginSwitch:
    """Let the staged weights serve after the groups that have begun; or restart these. See EngineCore.begin_switch."""

    restart: bool

    def apply(self, core: EngineCore) -> Future[ModelInfo]:
        """Begin, and return a future that is done when they serve. Raises LoadError."""
        return core.begin_switch(self.restart)


@dataclass(eq=False, slots=True)
class ControlCall(Generic[T]):
    """A control message that waits for its turn."""

    message: ControlMessage[T]
    future: Future[T]

    def run(self, core: EngineCore) -> None:
        """Apply the message and end its future. Raise the errors that must end the engine."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.message.apply(core)
        except Exception as error:
            self.future.set_exception(error)
            if isinstance(error, EngineDeadError):
                raise
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def fail(self, error: EngineError) -> None:
        """End the future with an error, unless it was canceled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
