"""Accept chats as they are usually written: messages and tools as dicts."""

from typing import Any, TypeVar

from scorepool import wire

Options = TypeVar("Options")
_TYPES: dict[str, Any] = {"messages": list[wire.Message], "tools": list[wire.Tool]}


def with_structs(options: Options) -> Options:
    """Return options whose messages and tools are structs. Raises ValueError, which names the place."""
    given: dict[str, Any] = dict(options)  # type: ignore[call-overload]
    for name in _TYPES.keys() & given.keys():
        if given[name] is not None:
            given[name] = wire.convert(given[name], _TYPES[name], name)
    return given  # type: ignore[return-value]
