"""Measure the values of a message whose type is any JSON, such as schemas and arguments, before they are built."""

from collections.abc import Iterable, Iterator
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, inspect

from scorepool.wire.request_fields import MAX_DEPTH

_CONTAINERS = {*range(0x80, 0xA0), *range(0xDC, 0xE0)}  # first bytes of maps and arrays in msgpack
_container = msgspec.msgpack.Decoder(dict[str | int, Raw] | list[Raw])


@cache
def outline(message_type: Any) -> Any:
    """Return a type that reads only the free-form values of a message, unread; None if it has none.

    An unknown field is skipped, and so are the fields that hold no free-form value.
    """
    return _outline(inspect.type_info(message_type))


def values(found: object, path: str = "") -> Iterator[tuple[str, Raw]]:
    """Yield the field and the bytes of every free-form value in a decoded outline."""
    if isinstance(found, Raw):
        yield path, found
    elif isinstance(found, list):
        for index, item in enumerate(found):
            yield from values(item, f"{path}[{index}]")
    elif isinstance(found, Struct):
        for name in found.__struct_fields__:
            yield from values(getattr(found, name), f"{path}.{name}".removeprefix("."))


def check_keys(value: bytes | Raw) -> None:
    """Check that no key of an object in a msgpack value is a list, before any is built. Raises ValueError.

    Python's hash of a list of integers follows from them, so a client can choose lists that all have the same hash: n
    of them, as keys, take n^2 steps. The hashes of strings follow from a secret, and few integers share one.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 2):  # the value itself, and the scalars in the deepest list
        containers = [each for each in level if memoryview(each)[0] in _CONTAINERS]
        if not containers:
            return
        try:
            level = [inner for each in containers for inner in _inner(_container.decode(each))]
        except msgspec.ValidationError:
            raise ValueError("expected JSON, whose objects have strings as keys") from None
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _inner(container: dict[str | int, Raw] | list[Raw]) -> Iterable[Raw]:
    return container.values() if isinstance(container, dict) else container


def _outline(node: inspect.Type) -> Any:
    match node:
        case inspect.Metadata(type=inner):
            return _outline(inner)
        case inspect.AnyType():
            return Raw
        case inspect.DictType(value_type=value):
            return None if _outline(value) is None else Raw
        case inspect.ListType(item_type=item, max_length=max_length):
            inner = _outline(item)
            return None if inner is None else Annotated[list[inner], Meta(max_length=max_length)]  # type: ignore[valid-type]
        case inspect.StructType():
            return _outline_of_struct(node)
        case inspect.UnionType(types=types):
            return _outline_of_union(types)
        case _:
            return None


def _outline_of_struct(node: inspect.StructType) -> Any:
    inner = [(field.encode_name, _outline(field.type)) for field in node.fields]
    fields = [(name, kind | UnsetType, UNSET) for name, kind in inner if kind is not None]
    return _struct(node, fields) if fields else None


def _outline_of_union(types: tuple[inspect.Type, ...]) -> Any:
    inner = [_outline(each) for each in types]
    if all(kind is None for kind in inner):
        return None
    others = [_without_values(each) for each, kind in zip(types, inner, strict=True) if kind is None]
    if Raw in inner or Raw in others:
        return Raw
    return reduce(or_, [*(kind for kind in inner if kind is not None), *others])


def _without_values(node: inspect.Type) -> Any:
    """Return the type of a member of a union that holds no free-form value."""
    match node:
        case inspect.NoneType():
            return None
        case inspect.StructType():
            return _struct(node, [])
        case _:
            return Raw


def _struct(node: inspect.StructType, fields: list[tuple[str, Any, Any]]) -> type[Struct]:
    return msgspec.defstruct(node.cls.__name__, fields, tag_field=node.tag_field, tag=node.tag)
