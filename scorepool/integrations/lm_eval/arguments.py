"""Check the arguments of the model, which lm_eval passes as it reads them from the command line."""

from collections.abc import Iterable, Mapping
from typing import Any


class ArgumentError(ValueError):
    """An argument of the model, or of its generation, is wrong."""


def check_names(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that the model does not have. Raises ArgumentError."""
    if unknown:
        raise ArgumentError(f"model_args {', '.join(sorted(unknown))}: expected {', '.join(known)}")


def number(name: str, value: object, low: float, high: float = float("inf")) -> None:
    """Refuse what is not a number from `low` to `high`. Raises ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        wanted = f"{low:g} to {high:g}" if high < float("inf") else f"a number from {low:g} on"
        raise ArgumentError(f"{name}={value}: expected {wanted}")
