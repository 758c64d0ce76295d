"""Run parts of NumPy's work on as many threads as the BLAS has. NumPy lets go of the GIL while it computes."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

Part = TypeVar("Part")


def for_each(compute: Callable[[Part], object], parts: Sequence[Part]) -> None:
    """Call `compute` for each part, which begin in their order. Parts must not write to the same memory.

    Meanwhile a product of matrices takes one thread: products that are divided themselves would wait for each other.
    """
    controller, num_threads, helpers = _threads()
    waiting = deque(parts)

    def compute_waiting() -> None:
        while True:
            try:
                part = waiting.popleft()
            except IndexError:
                return
            compute(part)

    with controller.limit(limits=1):
        helping = [helpers.submit(compute_waiting) for _ in range(min(len(parts), num_threads) - 1)]
        compute_waiting()
        for future in helping:
            future.result()


@cache
def _threads() -> tuple[ThreadpoolController, int, ThreadPoolExecutor]:
    """Return what limits the BLAS of NumPy and of MLX, how many threads they have, and as many less one of our own."""
    controller = ThreadpoolController().select(user_api="blas")
    num_threads = max((int(library["num_threads"]) for library in controller.info()), default=1)
    return controller, num_threads, ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="numpy")
