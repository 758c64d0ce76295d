"""Gemma's calls: call:name{key:value,...}, whose strings stand between tokens. No MLX.

call:look{place:<|"|>Zürich<|"|>,x:1}            Gemma 4
call:look{place:<escape>Zürich<escape>,x:1}      FunctionGemma
"""

import re
from functools import partial
from typing import Any, ClassVar

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    Schema,
    ToolCallTag,
    Vocabulary,
    check_name,
    delimiter_rule,
    literal,
)
from scorepool.engine.text.chat.call_formats.literal_reader import LiteralReader
from scorepool.engine.text.chat.call_formats.raw_values import text_rules
from scorepool.engine.text.chat.call_formats.schema_rules import SchemaRules, Spelling

_NAME = re.compile(r"[\w.-]+")
_NAMES = "letters, digits, _, . and -"
_CALL = re.compile(r"call:(?=[\w.-]+\s*\{)")


def parse(text: str, _: Any, quote: str) -> list[Call]:
    """Return the calls, one after the other. Raises ValueError."""
    reader, calls = LiteralReader(text, [quote], has_escapes=False), list[Call]()
    while not reader.is_at_end:
        reader.match(_CALL)
        name = reader.match(_NAME)
        reader.expect("{")
        calls.append({"name": name, "arguments": reader.mapping("}")})
    if not calls:
        raise ValueError("there is no call")
    return calls


class _GemmaSpelling(Spelling):
    """The spelling of Gemma's values. Its templates sort the keys."""

    words: ClassVar = {"true": "true", "false": "false", "null": "null"}
    comma = literal(",")
    colon = literal(":")
    any_key = "/[\\w.-]+/"

    def __init__(self, quote: str, vocabulary: Vocabulary) -> None:
        self._quote = quote
        self._is_token = quote in vocabulary
        self._rule = delimiter_rule(quote, vocabulary)

    def key(self, name: str) -> str:
        return literal(name) if _NAME.fullmatch(name) else self.constant(name)

    def constant(self, text: str) -> str:
        return f"{self._rule} {literal(text)} {self._rule}" if text else f"{self._rule} {self._rule}"

    def string(self, rule: str, schema: Schema, strict: bool) -> list[str]:
        """Return the rules of a string, with the closing quote in the terminal if it is no token."""
        if schema.get("maxLength") == 0:
            return [f"{rule}: {self.constant('')}"]
        end, never = ("", self._quote) if self._is_token else (self._quote, "")
        text = f"{rule}_text"
        after = f" {self._rule}" if self._is_token else ""
        return [f"{rule}: {self._rule} {text}{after}", *text_rules(text, schema, strict, end, never)]

    def order(self, names: list[str]) -> list[str]:
        return sorted(names, key=str.lower)


def _arguments(rule: str, parameters: Schema, strict: bool, spelling: Spelling) -> list[str]:
    rules = SchemaRules(spelling, parameters, rule, strict)
    rules.add_object(rule, parameters)
    return rules.lines


def _tag(start: str, end: str, vocabulary: Vocabulary, quote: str) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, _NAMES)
        return f"{literal(f'call:{name}')} {arguments}"

    call = f"{start} function {end}"
    arguments = partial(_arguments, spelling=_GemmaSpelling(quote, vocabulary))
    return ToolCallTag(call_of=call_of, one=call, several=f"({call})+", arguments=arguments)


def _format(markers: tuple[str, str], quote: str, mlx_lm: str) -> CallFormat:
    return CallFormat(
        markers=markers,
        parse=partial(parse, quote=quote),
        tag=partial(_tag, quote=quote),
        delimiters=(quote,),
        mlx_lm=mlx_lm,
        tells=markers,
    )


GEMMA4 = _format(("<|tool_call>", "<tool_call|>"), '<|"|>', "gemma4")
FUNCTION_GEMMA = _format(("<start_function_call>", "<end_function_call>"), "<escape>", "function_gemma")
