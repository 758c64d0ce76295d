"""What a JSON Schema says about a value: its types, its parts, and what a grammar cannot follow. No MLX."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.call_formats.call_format import Schema

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
MAX_DEPTH = 32  # of references that lead to references
_IDENTIFIERS = frozenset(("$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "x-guidance"))
_ANNOTATIONS = _IDENTIFIERS.union(
    ("default", "deprecated", "description", "discriminator", "examples", "nullable", "readOnly", "strict", "title"),
    ("writeOnly",),
)


def resolve(schema: Any, root: Schema) -> Schema:
    """Return the schema that a reference names, or the schema itself; {} for one that says nothing.

    Raises InvalidRequest for a reference that leads nowhere.
    """
    for _ in range(MAX_DEPTH):
        if schema is False:
            raise InvalidRequest("the schema false allows no value")
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if reference is None:
            return schema
        schema = _referenced(reference, root)
    raise InvalidRequest("its references lead back to themselves")


def _referenced(reference: Any, root: Schema) -> Any:
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise InvalidRequest(f"the reference {reference!r} does not lead into the schema")
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise InvalidRequest(f"the reference {reference!r} leads nowhere")
        found = found[name]
    return found


def choices(schema: Schema) -> Sequence[Any] | None:
    """Return the schemas of which one holds, None if the schema is no choice."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        found = schema.get(keyword)
        if isinstance(found, Sequence) and found and (keyword != "allOf" or len(found) == 1):
            return found
    return None


def constants(schema: Schema) -> Sequence[Any] | None:
    """Return the values of which the schema allows one, None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, Sequence) and not isinstance(found, str) and found else None


def leaves(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yield the schemas without choices of which one holds. Each reference is followed once. Raises InvalidRequest."""
    waiting, followed = [schema], set[str]()
    while waiting:
        found = waiting.pop(0)
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if isinstance(reference, str):
            if reference in followed:
                continue
            followed.add(reference)
        found = resolve(found, root)
        several = None if constants(found) is not None else choices(found)
        if several is None:
            yield found
        else:
            waiting += several


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that the schema allows; all of them if it does not say. Raises InvalidRequest."""
    return frozenset().union(*(_types_of_leaf(leaf) for leaf in leaves(schema, root)))


def _types_of_leaf(leaf: Schema) -> frozenset[str]:
    if (values := constants(leaf)) is not None:
        return frozenset(type_name(value) for value in values)
    told = leaf.get("type")
    names = frozenset([told] if isinstance(told, str) else map(str, told) if isinstance(told, list) else TYPES)
    return names | {"integer"} if "number" in names else names


def limit_of(schema: Schema, keyword: str) -> int | None:
    """Return a limit of a length, None if there is none. Raises InvalidRequest."""
    found = schema.get(keyword)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise InvalidRequest(f"{keyword} is {str(found)[:40]!r}, expected a whole number from 0 on")
    return found


def bounds_of(schema: Schema, least_keyword: str, most_keyword: str) -> tuple[int, int | None]:
    """Return the least and the greatest length. Raises InvalidRequest."""
    least, most = limit_of(schema, least_keyword) or 0, limit_of(schema, most_keyword)
    if most is not None and least > most:
        raise InvalidRequest(f"{least_keyword} is {least}, and {most_keyword} is {most}")
    return least, most


def type_name(value: Any) -> str:
    """Return the type of a JSON value. A whole number is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def properties_of(parameters: Schema) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name and schema of each property and whether it is required. Those without a schema come last."""
    found = parameters.get("properties")
    properties = found if isinstance(found, Mapping) else {}
    told = parameters.get("required")
    required = [name for name in told if isinstance(name, str)] if isinstance(told, list | tuple) else []
    for name, schema in properties.items():
        yield name, schema, name in required
    for name in required:
        if name not in properties:
            yield name, {}, True


def additional_of(schema: Schema) -> Any:
    """Return the schema of properties without a name of their own, None if there may be none.

    A schema that names properties and says nothing of others means only those.
    """
    found = schema.get("additionalProperties", None if schema.get("properties") else {})
    if found is None or found is False:
        return None
    return found if isinstance(found, Mapping) else {}


def check_keywords(schema: Schema, followed: Collection[str], strict: bool) -> None:
    """Raise InvalidRequest for a keyword that the grammar of this format cannot follow, if it must follow all."""
    unknown = sorted(schema.keys() - set(followed) - _ANNOTATIONS)
    if strict and unknown:
        raise InvalidRequest(f"{unknown[0]!r} cannot be followed in the format of this model's calls")


def check_types(names: Collection[str]) -> None:
    """Raise InvalidRequest for a type that JSON does not have."""
    unknown = sorted(str(name) for name in names if name not in TYPES)
    if unknown:
        raise InvalidRequest(f"Invalid type: {unknown[0]}")


def properties_of_function(name: str, tools: Any) -> tuple[Mapping[str, Any], Schema]:
    """Return the properties of an offered function's parameters, and the parameters. Empty if it is not offered."""
    for tool in tools or ():
        function = tool.get("function") or {}
        if function.get("name") == name:
            parameters = function.get("parameters") or {}
            properties = parameters.get("properties")
            return (properties if isinstance(properties, Mapping) else {}), parameters
    return {}, {}
