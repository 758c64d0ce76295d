"""Build hostile bodies from the OpenAPI document: every field of every body, filled with very much of something.

place      a path to a field, such as ("messages", 0, "content"), in a body that is valid but for this field
filling    what stands there: a long string, many numbers, lists, texts or objects, an object with many keys, ...
"""

import json
from collections.abc import Iterator
from typing import Any

from scorepool import store
from scorepool.api.app import create_app

DOCUMENT = create_app(store.Settings()).openapi()
MAX_DEPTH = 8  # of places: schemas and arguments may hold any JSON
Place = tuple[str | int, ...]
NAMED: dict[str, Any] = {"model": "demo", "max_tokens": 1, "prompt_lengths": [0], "sequences": [[1, 2]]}
# Of fields that a body needs without its schema requiring them: exactly one of several.
ONE_OF: dict[str, dict[str, Any]] = {
    "Generate": {"prompt": "a"},
    "Tokenize": {"prompt": "a"},
    "TokenizeRequest": {"prompt": "a"},
    "GenerateRequest": {"text": "a"},
    "ScoreItem": {"prompt": "a"},
    "ChatMessage": {"content": "a"},
}
FILLINGS = {
    "string": lambda count: b'"' + b"a" * 4 * count + b'"',
    "numbers": lambda count: b"[" + b"0," * (count - 1) + b"0]",
    "texts": lambda count: b"[" + b'"a",' * (count - 1) + b'"a"]',
    "lists": lambda count: b"[" + b"[0]," * (count - 1) + b"[0]]",
    "objects": lambda count: b"[" + b"{}," * (count - 1) + b"{}]",
    "keys": lambda count: b"{" + b",".join(b'"%d":0' % number for number in range(count)) + b"}",
    "key": lambda count: b'{"' + b" - at `$" * (count // 2) + b'\\n":0}',
    "digits": lambda count: b"9" * count,
}


def resolve(schema: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a schema without its reference, and the name of what it referred to."""
    name = ""
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = DOCUMENT["components"]["schemas"][name]
    return schema, name


def alternatives(schema: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """List the schemas that a schema allows, without references and without null."""
    found, name = resolve(schema)
    if "anyOf" not in found:
        return [] if found.get("type") == "null" else [(found, name)]
    return [each for option in found["anyOf"] for each in alternatives(option)]


def example(schema: dict[str, Any], name: str = "") -> Any:
    """Return a small value that a schema allows."""
    found, reference = alternatives(schema)[0]
    if name in NAMED:
        return NAMED[name]
    if "enum" in found:
        return found["enum"][0]
    match found.get("type"):
        case "array":
            return [example(found.get("items", {}))]
        case "object":
            return ONE_OF.get(reference, {}) | {
                each: example(found["properties"][each], each) for each in found.get("required", ())
            }
        case "string":
            return "a"
        case "integer" | "number":
            return max(1, found.get("minimum", 1))
        case "boolean":
            return False
    return "a"


def places(schema: dict[str, Any], above: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Yield every place of a schema, the body in which None stands there, and an entry if a list may stand there."""
    if len(above) == MAX_DEPTH:
        return
    for found, reference in alternatives(schema):
        if found.get("type") == "array" and "items" in found:
            for place, inner, entry in places(found["items"], (*above, 0)):
                yield place, [inner], entry
        base = example({"$ref": f"#/components/schemas/{reference}"}) if reference else {}
        for name, field in found.get("properties", {}).items():
            if "enum" in field and len(field["enum"]) == 1:
                continue  # the tag of a union
            others = {other: value for other, value in base.items() if {other, name} != {"prompt", "messages"}}
            lists = [each for each, _ in alternatives(field) if each.get("type") == "array"]
            yield (*above, name), others | {name: None}, example(lists[0].get("items", {})) if lists else None
            for place, inner, entry in places(field, (*above, name)):
                yield place, others | {name: inner}, entry


def hostile_bodies(path: str, count: int, every_filling: bool) -> Iterator[tuple[str, bytes]]:
    """Yield bodies for the POST route, each with a name: every place with every filling, or with one in turn."""
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    for filling, fill in FILLINGS.items():
        if every_filling:
            yield f"{path} body: {filling}", fill(count)
    for number, (place, body, entry) in enumerate(places(schema)):
        chosen = FILLINGS if every_filling else [[*FILLINGS][number % len(FILLINGS)]]
        written = json.dumps(body).encode()
        before, _, after = written.partition(b"null")
        if entry is not None:
            one = json.dumps(entry).encode()
            yield f"{path} {place}: valid entries", before + b"[" + (one + b",") * (count - 1) + one + b"]" + after
        for filling in chosen:
            yield f"{path} {place}: {filling}", before + FILLINGS[filling](count) + after


ROUTES = [
    path
    for path, methods in DOCUMENT["paths"].items()
    if "{" not in path and "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
]
