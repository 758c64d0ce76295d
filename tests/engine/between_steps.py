"""A control message for tests: a function that drives the core of an engine, on its thread."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from scorepool.engine import Engine, Sequence
from scorepool.engine.core import EngineCore
from scorepool.engine.group import Group

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BetweenSteps(Generic[T]):
    """Applies a function."""

    apply: Callable[[EngineCore], T]


def drive(engine: Engine, function: Callable[[EngineCore], T]) -> T:
    """Return what a function of the core returns, which is applied between two steps."""
    return engine.control(BetweenSteps(function)).result(120)


def add(core: EngineCore, *sequences: Sequence) -> Group:
    """Add sequences as one group."""
    group = Group(list(sequences), Future(), None)
    core.add(group)
    return group


def cancel(core: EngineCore, *groups: Group) -> None:
    """Take groups out of the batch."""
    for group in groups:
        group.future.cancel()
    core.drop_canceled()
