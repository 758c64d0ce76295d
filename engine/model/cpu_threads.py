"""Run parts of NumPy's work on as many threads as the BLAS has. NumPy lets go of the GIL while it computes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

Part = TypeVar("Part")

_lock = Lock()
_limits: list[Any] = []  # of each that is inside `one_thread_a_product`; the first has set it, the others are None


def num_threads() -> int:
    """Return how many threads the BLAS of NumPy and of MLX has."""
    return _threads()[1]


@contextmanager
def one_thread_a_product() -> Iterator[None]:
    """Let every product of matrices of the process take one thread, until all that are inside have left.

    Products on several threads at once would wait for each other.
    """
    controller = _threads()[0]
    with _lock:
        _take_control(controller)
        _limits.append(None if _limits else controller.limit(limits=1))
    try:
        yield
    finally:
        with _lock:
            _take_control(controller)
            if len(_limits) == 1:
                _limits[0].restore_original_limits()
            _limits.pop()  # the first one stays to the end, whoever leaves


def for_each(compute: Callable[[Part], object], parts: Sequence[Part]) -> None:
    """Call `compute` for each part, which begin in their order. Parts must not write to the same memory.

    Meanwhile a product of matrices takes one thread.
    """
    _, most, helpers = _threads()
    waiting = deque(parts)

    def compute_waiting() -> None:
        while True:
            try:
                part = waiting.popleft()
            except IndexError:
                return
            compute(part)

    with one_thread_a_product():
        helping = [helpers.submit(compute_waiting) for _ in range(min(len(parts), most) - 1)]
        compute_waiting()
        for future in helping:
            if not future.cancel():  # it has begun: helpers may be busy with another thread's parts
                future.result()


def _take_control(controller: ThreadpoolController) -> None:
    """Let this thread set the limit: from threadpoolctl 3.8 on, others but the first that ever did so are ignored."""
    for library in controller.lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@cache
def _threads() -> tuple[ThreadpoolController, int, ThreadPoolExecutor]:
    """Return what limits the BLAS of NumPy and of MLX, how many threads they have, and as many less one of our own."""
    controller = ThreadpoolController().select(user_api="blas")
    most = max((int(library["num_threads"]) for library in controller.info()), default=1)
    return controller, most, ThreadPoolExecutor(max(1, most - 1), thread_name_prefix="numpy")
