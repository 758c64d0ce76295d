"""What the parts of Client share: they run coroutines of AsyncClient and wait for them."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Blocking(ABC):
    """Wait for what runs on an event loop in another thread."""

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop and return its result."""

    @abstractmethod
    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        """Yield items as they come."""
