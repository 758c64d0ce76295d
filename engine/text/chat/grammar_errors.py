"""Say in one line what llguidance finds wrong with a grammar, in terms of what the caller gave. Pure."""

import re

from scorepool.engine.text.chat.gbnf import is_gbnf
from scorepool.engine.text.chat.grammar import ABOUT_PARAMETERS, CONTENT, StructuredOutputSpec, index_of_arguments
from scorepool.engine.text.chat.regex_rule import explain_regex

_AT_LINE = re.compile(r"(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<message>.*)")  # one of another, in a sub-grammar
_IN_PATTERN = re.compile(r"(?P<where>.*):\n(?P<pattern>(?:.*\n)+?)error: (?P<message>.*)")  # carets below it
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


def explain(spec: StructuredOutputSpec, grammar: str, error: str) -> str:
    """Return an error of llguidance in one line, and say which part of the request it is about."""
    message, line, column = one_line(error), 0, 0
    while at_line := _AT_LINE.fullmatch(message):
        message, line, column = at_line["message"], int(at_line["line"]), int(at_line["column"])
    lines = grammar.split("\n")
    content_line = next((number for number, rule in enumerate(lines, 1) if rule.startswith(CONTENT)), len(lines) + 1)
    if line < content_line:
        index = index_of_arguments(lines[line - 1]) if line else None
        return message if index is None else f"{ABOUT_PARAMETERS}{spec.functions[index].name!r}: {message}"
    if spec.regex is not None:
        return explain_regex(spec.regex, error) or message
    if spec.grammar is not None and not is_gbnf(spec.grammar) and line > content_line:
        return f"line {line - content_line}, column {column}: {message}"
    return message


def one_line(error: str) -> str:
    """Return the first line of an error, and the pattern that is wrong. The rest is the library's state."""
    if found := _IN_PATTERN.match(error):
        error = f"{found['where']}: {found['message']}: {' '.join(found['pattern'].split()).rstrip('^ ')}"
    return error.partition("\n")[0].replace(_ONE_OF, "oneOf whose choices may overlap: use anyOf")[:300]
