"""Values that a format writes without quotes: a string as it is, anything else as JSON. No MLX.

    <parameter=place>        <parameter=x>
    Zürich                   [1, 2]
    </parameter>             </parameter>

The schema says what a text means: "5" is a string where the schema wants one, and a number where it does not.
"""

import ast
import json
import re
from typing import Any

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.call_formats.call_format import COMPACT, Schema, in_regex, json_rule, literal
from scorepool.engine.text.chat.call_formats.schemas import (
    bounds_of,
    check_keywords,
    check_types,
    constants,
    leaves,
    resolve,
    type_name,
    types_of,
)

_PYTHON_WORDS = {"True": True, "False": False, "None": None}  # as Jinja writes them
_UNREADABLE = object()
_NO_VALUE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)  # as literal_eval's documentation says
_JSON_BEGINNING = r'\s"\-0-9\[{'  # a string that may also be a number, a list or an object does not begin like one
_WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
_STRING_KEYWORDS = ("type", "anyOf", "oneOf", "allOf", "$ref", "minLength", "maxLength", "pattern", "format")
_ANCHORED = re.compile(r"(?P<start>\^?)(?P<body>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\\^$\[])*)(?P<end>\$?)", re.DOTALL)
_MAX_CHECKED_LENGTH = 2000  # of strings with a limit: beyond, a grammar cannot also tell what they must not hold
_ANY = "(.|\\n)*"
_DIGITS = "[0-9]"
_DAY = r"(0[1-9]|[12][0-9]"  # and more, as the month has
_DATE = rf"{_DIGITS}{{4}}-((0[13578]|1[02])-{_DAY}|3[01])|(0[469]|11)-{_DAY}|30)|02-{_DAY}))"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.{_DIGITS}+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "time": _TIME,
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


def read_value(text: str, schema: Any, root: Schema) -> Any:
    """Return the value that a text means under a schema."""
    types = told_types(schema, root)
    if types == {"string"}:
        return text
    value = _read(text.strip())
    if value is _UNREADABLE or (type_name(value) not in types and "string" in types):
        return text
    return value


def told_types(schema: Any, root: Schema) -> frozenset[str]:
    """Return the types that a schema allows: all of them if it cannot be followed."""
    try:
        return types_of(schema, root)
    except InvalidRequest:
        return types_of({}, {})


def _read(text: str) -> Any:
    """Return the value of JSON, or of Python, as Jinja writes it; _UNREADABLE if it is none that JSON has."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    for read in (json.loads, ast.literal_eval) if text[:1] in ("{", "[") else (json.loads,):
        try:
            value = read(text)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # {1, 2} and [1e999] are none of JSON
        except _NO_VALUE:
            continue
        return value
    return _UNREADABLE


def value_rules(rule: str, schema: Any, root: Schema, strict: bool, end: str, never: str = "") -> list[str]:
    """Return the rules of a value and of the text that ends it. `rule` names the first. Raises InvalidRequest.

    A string and its end are one terminal: a terminal of the string alone would go on into the end. If a token follows
    the end, which may be empty, no string holds the text `never`, with which that token begins.
    """
    schema = resolve(schema, root)
    types = types_of(schema, root)
    check_types(types)
    if "string" not in types and constants(schema) is None:
        return [f"{rule}: {rule}_json {literal(end)}", f"{rule}_json: {_json(schema, root, strict)}"]
    alternatives, rules = list[str](), list[str]()
    for index, leaf in enumerate(leaves(schema, root)):
        if (values := constants(leaf)) is not None:
            alternatives += [literal(_written(value) + end) for value in values]
            continue
        leaf_types = types_of(leaf, root)
        for name in sorted(leaf_types & _WORDS.keys()):
            alternatives += [literal(word + end) for word in _WORDS[name] if word[0].islower()]
        if "string" in leaf_types:
            if leaf_types <= {"string", *_WORDS}:  # else the grammar of JSON checks them
                check_keywords(leaf, _STRING_KEYWORDS, strict)
            alternatives.append(f"{rule}_text_{index}")
            is_unlike_json = bool(types - {"string"} - _WORDS.keys())
            rules += text_rules(f"{rule}_text_{index}", leaf, strict, end, never, is_unlike_json)
        if json_types := leaf_types - {"string"} - _WORDS.keys():
            alternatives.append(f"{rule}_json_{index} {literal(end)}")
            rules.append(f"{rule}_json_{index}: {_json({**leaf, 'type': _as_listed(json_types)}, root, strict)}")
    return [f"{rule}: {' | '.join(alternatives)}", *rules]


def by_kind(schema: Any, root: Schema) -> tuple[Schema | None, Schema | None]:
    """Divide a schema: one of the strings that it allows, and one of its other values. None where it allows none.

    Raises InvalidRequest.
    """
    types = types_of(schema, root)
    if "string" not in types or types == {"string"}:
        return (None, schema) if "string" not in types else (schema, None)
    strings, others = list[Schema](), list[Schema]()
    for leaf in leaves(schema, root):
        if (values := constants(leaf)) is not None:
            for of_kind, are_strings in ((strings, True), (others, False)):
                if kept := [value for value in values if isinstance(value, str) == are_strings]:
                    of_kind.append({"enum": kept})
            continue
        types = types_of(leaf, root)
        check_types(types)
        if "string" in types:
            is_scalar = types <= {"string", *_WORDS}  # else the grammar of JSON checks the other keywords
            keywords = leaf.keys() if is_scalar else leaf.keys() & set(_STRING_KEYWORDS)
            strings.append({name: leaf[name] for name in leaf if name in keywords} | {"type": "string"})
        if types - {"string"}:
            others.append({**leaf, "type": _as_listed(types - {"string"})})
    return ({"anyOf": strings} if strings else None), ({"anyOf": others} if others else None)


def _as_listed(types: frozenset[str]) -> list[str]:
    return sorted(types - {"integer"} if "number" in types else types)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(schema: Schema, root: Schema, strict: bool) -> str:
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    options = COMPACT | {"item_separator": ", ?", "key_separator": ": ?"}
    lenient = {} if strict else {"lenient": True, "coerce_one_of": True}
    return json_rule({**definitions, **schema}, options | lenient)


def text_rules(
    rule: str, schema: Schema, strict: bool, end: str, never: str, is_unlike_json: bool = False
) -> list[str]:
    """Return the rules of a string and its end, which is in it once. Raises InvalidRequest.

    A lazy terminal ends with the first end in it. That is cheap, but a pattern could put off the end, so where there is
    one the terminal says that nothing follows the end. Such a terminal with a limited length finds no end.
    """
    terminal, ending, pattern = rule.upper(), in_regex(end), _pattern(schema, strict)
    least, most = bounds_of(schema, "minLength", "maxLength")
    if pattern is not None and not never and (least or most is not None):
        if strict:
            raise InvalidRequest("a pattern or format with a limit of the length cannot be followed in these calls")
        least, most = 0, None
    free = f"{{0,{'' if most is None else most - least}}}" if most is not None else "*"
    found = [f"/(.|\\n){{{least}}}(.|\\n){free}{ending}/" if least else f"/(.|\\n){free}{ending}/"]
    if never and not (end and most is not None and most > _MAX_CHECKED_LENGTH):
        found.append(f"~/(.|\\n)*{in_regex(never)}(.|\\n)*/")
    elif pattern is not None:
        found.append(f"~/(.|\\n)*{ending}(.|\\n)+/")
    elif least:  # the end does not begin in these characters
        found = [f"/[^{in_regex(end[0])}]{{{least}}}(.|\\n){free}{ending}/"]
    if pattern is not None:
        found.append(f"/{pattern}{ending}/")
    if is_unlike_json:
        found.append(f"/[^{_JSON_BEGINNING}](.|\\n)*/")
    lazy = "" if never or pattern is not None else "[lazy]"
    return [f"{rule}{lazy}: {terminal}", f"{terminal}: {' & '.join(found)}"]


def _pattern(schema: Schema, strict: bool) -> str | None:
    """Return the regular expression of the strings, None if any will do. Raises InvalidRequest."""
    if isinstance(told := schema.get("format"), str):
        if told in _FORMATS:
            return _FORMATS[told].replace("/", "\\/")
        if strict:
            raise InvalidRequest(f"Unknown format: {told}")
    pattern = schema.get("pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        raise InvalidRequest(f"pattern is {str(pattern)[:40]!r}, expected a regular expression")
    found = _ANCHORED.fullmatch(pattern)
    if found is None:
        if strict:
            raise InvalidRequest(f"a pattern with anchors inside cannot be followed in these calls: {pattern[:100]}")
        return None
    body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", found["body"]).replace("\n", "\\n")
    before, after = ("" if found[anchor] else _ANY for anchor in ("start", "end"))
    return f"{before}({body}){after}"
