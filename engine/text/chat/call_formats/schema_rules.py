"""JSON Schema to the grammar of values that are not JSON. No MLX."""

from collections.abc import Mapping
from typing import Any, ClassVar

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.call_formats.call_format import COMPACT, Schema, json_rule
from scorepool.engine.text.chat.call_formats.schemas import (
    additional_of,
    bounds_of,
    check_keywords,
    check_types,
    choices,
    constants,
    properties_of,
    resolve,
    types_of,
)

_OF_OBJECTS = ("additionalProperties", "properties", "required")
_OF_ARRAYS = ("items", "maxItems", "minItems")
_OF_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_OF_STRINGS = ("format", "maxLength", "minLength", "pattern")
_CONSTRAINTS = {
    "array": _OF_ARRAYS,
    "boolean": (),
    "integer": _OF_NUMBERS,
    "null": (),
    "number": _OF_NUMBERS,
    "object": _OF_OBJECTS,
    "string": _OF_STRINGS,
}


class Spelling:
    """How a format writes values. Fragments are of the grammar."""

    words: ClassVar[Mapping[str, str]]  # what it writes for true, false, null
    comma: str
    colon: str
    any_key: str
    of_objects = ('"{"', '"}"')
    of_arrays = ('"["', '"]"')

    def member(self, name: str, value: str) -> str:
        """Return the fragment of a key with the rule of its value. Raises InvalidRequest."""
        return f"{self.key(name)} {self.colon} {value}"

    def any_member(self, value: str) -> str:
        return f"{self.any_key} {self.colon} {value}"

    def item(self, value: str) -> str:
        """Return the fragment of a list's element."""
        return value

    def key(self, name: str) -> str:
        """Return the fragment of an object's key. Raises InvalidRequest."""
        raise NotImplementedError

    def constant(self, text: str) -> str:
        """Return the fragment of one string."""
        raise NotImplementedError

    def string(self, rule: str, schema: Schema, strict: bool) -> list[str]:
        """Return the rules of the strings that a schema allows. Raises InvalidRequest."""
        raise NotImplementedError

    def order(self, names: list[str]) -> list[str]:
        """Return an object's keys in the order in which the format writes them."""
        return names


class SchemaRules:
    """The rules of one schema. All methods raise InvalidRequest for what cannot be followed."""

    def __init__(self, spelling: Spelling, root: Schema, prefix: str, strict: bool) -> None:
        self.lines: list[str] = []
        self._spelling = spelling
        self._root = root
        self._prefix = prefix
        self._strict = strict
        self._references: dict[str, str] = {}  # the rule of each
        self._any: str | None = None

    def add_value(self, rule: str, schema: Any) -> str:
        """Add the rule of a value, and return its name, or that of a rule that is the same."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference in self._references:
                return self._references[reference]
            self._references[reference] = rule
        schema = resolve(schema, self._root)
        if (values := constants(schema)) is not None:
            self._add(rule, " | ".join(self._constant(value) for value in values))
        elif (several := choices(schema)) is not None:
            self._check_choice(schema)
            self._add_choice(rule, {f"{rule}_{index}": each for index, each in enumerate(several)})
        else:
            self._add_typed(rule, schema)
        return rule

    def add_object(self, rule: str, schema: Schema, spelling: Spelling | None = None) -> None:
        """Add the rules of an object: its properties in order, each at most once, then others."""
        spelling = spelling or self._spelling
        opening, closing = spelling.of_objects
        check_keywords(schema, ("type", *_OF_OBJECTS), self._strict)
        found = {name: (each, is_required) for name, each, is_required in properties_of(schema)}
        members, required = list[str](), list[bool]()
        for index, name in enumerate(spelling.order(list(found))):
            value = self.add_value(f"{rule}_{index}", found[name][0])
            members.append(spelling.member(name, value))
            required.append(found[name][1])
        more = ""
        if (additional := additional_of(schema)) is not None:
            more = spelling.any_member(self.add_value(f"{rule}_more", additional))
        self._add(rule, f"{opening} {self._members(rule, members, required, more, spelling.comma)} {closing}")

    def _members(self, rule: str, members: list[str], required: list[bool], more: str, comma: str) -> str:
        """Return the fragment of members with commas between them, those that are not required left out or not.

        The rule `rest_i` is what follows a member before the i-th.
        """
        rest = f"({comma} {more})*" if more else ""
        heads, is_optional = [f"{more} {rest}"] if more else list[str](), True
        for index in reversed(range(len(members))):
            head = f"{members[index]} {rest}"
            heads, is_optional = ([head], False) if required[index] else ([head, *heads], is_optional)
            if index:
                before = f"{comma} {members[index]}" if required[index] else f"({comma} {members[index]})?"
                self._add(f"{rule}_rest_{index}", f"{before} {rest}")
                rest = f"{rule}_rest_{index}"
        if not heads:
            return ""
        return f"({' | '.join(heads)}){'?' if is_optional else ''}"

    def _add_typed(self, rule: str, schema: Schema) -> None:
        types = types_of(schema, self._root)
        check_types(types)
        names = sorted(types - {"integer"} if "number" in types else types)
        followed = {"type"}.union(*(_CONSTRAINTS[name] for name in names))
        check_keywords(schema, followed, self._strict)
        if len(names) == len(_CONSTRAINTS) - 1 and not schema.keys() & followed - {"type"}:
            self._add(rule, self._any_value())
            return
        alternatives = list[str]()
        for name in names:
            typed = {"type": name} | {key: schema[key] for key in _CONSTRAINTS[name] if key in schema}
            alternatives.append(self._typed(rule if len(names) == 1 else f"{rule}_{name}", name, typed))
        if len(names) > 1:
            self._add(rule, " | ".join(alternatives))

    def _typed(self, rule: str, name: str, schema: Schema) -> str:
        """Add the rule of a value of one type, and return the rule's name."""
        words = self._spelling.words
        match name:
            case "string":
                self.lines += self._spelling.string(rule, schema, self._strict)
            case "number" | "integer":
                self._add(rule, json_rule(schema, COMPACT if self._strict else COMPACT | {"lenient": True}))
            case "boolean":
                self._add(rule, f'"{words["true"]}" | "{words["false"]}"')
            case "null":
                self._add(rule, f'"{words["null"]}"')
            case "array":
                self._add_array(rule, schema)
            case _:
                self.add_object(rule, schema)
        return rule

    def _add_array(self, rule: str, schema: Schema) -> None:
        items = schema.get("items", {})
        if self._strict and not isinstance(items, Mapping | bool):
            raise InvalidRequest("items is a list, and must be a schema in these calls")
        item = self._spelling.item(self.add_value(f"{rule}_item", items))
        opening, closing = self._spelling.of_arrays
        least, most = bounds_of(schema, "minItems", "maxItems")
        if most == 0:
            self._add(rule, f"{opening} {closing}".strip() or '""')
            return
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f" ({self._spelling.comma} {item}){bounds}"
        self._add(rule, f"{opening} ({item}{more}){'' if least else '?'} {closing}")

    def _add_choice(self, rule: str, several: Mapping[str, Any]) -> None:
        self._add(rule, " | ".join(self.add_value(name, each) for name, each in several.items()))

    def _check_choice(self, schema: Schema) -> None:
        if self._strict and "oneOf" in schema and "anyOf" not in schema:
            raise InvalidRequest("oneOf whose choices may overlap: use anyOf")
        check_keywords(schema, ("allOf", "anyOf", "oneOf", "type"), self._strict)

    def _any_value(self) -> str:
        """Return the rule of any value. It refers to itself."""
        if self._any is None:
            rule = self._any = f"{self._prefix}_any"
            spelling, comma = self._spelling, self._spelling.comma
            scalars = [
                self._typed(f"{rule}_{name}", name, {"type": name}) for name in ("string", "number", "boolean", "null")
            ]
            several = [
                f"{opening} ({part} ({comma} {part})*)? {closing}"
                for (opening, closing), part in (
                    (spelling.of_arrays, spelling.item(rule)),
                    (spelling.of_objects, spelling.any_member(rule)),
                )
            ]
            self._add(rule, " | ".join([*scalars, *several]))
        return self._any

    def _constant(self, value: Any) -> str:
        spelling = self._spelling
        match value:
            case None:
                return f'"{spelling.words["null"]}"'
            case bool():
                return f'"{spelling.words["true" if value else "false"]}"'
            case str():
                return spelling.constant(value)
            case int() | float():
                return f'"{value}"'
            case _:
                raise InvalidRequest("a constant that is a list or an object cannot be followed in these calls")

    def _add(self, rule: str, fragment: str) -> None:
        self.lines.append(f"{rule}: {fragment}")
