"""Change what single modules of a loaded model take and return. mlx-lm's own classes stay as they are.

Modules of one class stay of one class: layers that differ in their classes are all run by the self-test.
"""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

Transform = Callable[[mx.array], mx.array]


def transform_input(modules: Iterable[Any], transform: Transform) -> None:
    """Make the modules compute `module(transform(hidden))`."""

    def wrap(kind: Any) -> Callable[..., mx.array]:
        return lambda self, hidden, *args: kind.__call__(self, transform(hidden), *args)

    _replace_calls(modules, wrap)


def transform_output(modules: Iterable[Any], transform: Transform) -> None:
    """Make the modules compute `transform(module(hidden))`."""

    def wrap(kind: Any) -> Callable[..., mx.array]:
        return lambda self, *args: transform(kind.__call__(self, *args))

    _replace_calls(modules, wrap)


def _replace_calls(modules: Iterable[Any], wrap: Callable[[type], Callable[..., mx.array]]) -> None:
    wrapped: dict[type, type] = {}
    for module in modules:
        kind = type(module)
        if kind not in wrapped:
            wrapped[kind] = type(kind.__name__, (kind,), {"__call__": wrap(kind)})
        module.__class__ = wrapped[kind]
