"""Quote values that a client sent in errors. A value is cut before it is written, so its size costs nothing."""

from collections.abc import Iterator

MAX_QUOTED = 80  # characters of a value that are repeated in an error


def quote(value: object) -> str:
    """Return the start of the value's repr, at most MAX_QUOTED characters."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_QUOTED:
            break
    return cut(text)


def cut(text: str) -> str:
    """Return the start of a text, at most MAX_QUOTED characters: for a name that is shown without quotes."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def _pieces(value: object) -> Iterator[str]:
    """Yield the repr of a value in pieces. A string longer than MAX_QUOTED is cut."""
    match value:
        case str() | bytes():
            yield repr(value[: MAX_QUOTED + 1])
        case list():
            yield from _joined("[", (_pieces(each) for each in value), "]")
        case dict():
            yield from _joined("{", (_entry(key, each) for key, each in value.items()), "}")
        case _:
            yield repr(value)


def _joined(first: str, items: Iterator[Iterator[str]], last: str) -> Iterator[str]:
    yield first
    for index, item in enumerate(items):
        if index:
            yield ", "
        yield from item
    yield last


def _entry(key: object, value: object) -> Iterator[str]:
    yield from _pieces(key)
    yield ": "
    yield from _pieces(value)
