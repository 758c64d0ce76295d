"""Build the grammar of an answer from what a caller asks for: constrained content, function calls, or either. No MLX.

The model's structural tag says how such an answer is written; this module says what it consists of and in what order.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat import gbnf
from scorepool.engine.text.chat.call_formats.call_format import COMPACT, ToolCallTag, json_rule
from scorepool.engine.text.chat.output_parser import OutputParser
from scorepool.engine.text.chat.regex_rule import regex_rule
from scorepool.engine.text.chat.structural_tag import StructuralTag

# Without `no_forcing`, llguidance picks tokens itself where only one text may follow, and may write markers as text.
_OPTIONS = '%llguidance {"no_forcing": true}'
CONTENT = "content: "
ABOUT_PARAMETERS = "the parameters of "  # the beginning of an error about a function
_ARGUMENTS_RULE = re.compile(r"arguments_(?P<index>\d+)\w*(\[lazy\])?: ", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    parameters: Mapping[str, Any]  # JSON Schema of an object
    strict: bool = False  # if not, unsupported keywords and formats are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputSpec:
    """Content of a form, calls of these functions, or either. Without a form content is free. At most one is given."""

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None  # that the whole content matches
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # in GBNF or in llguidance's Lark
    functions: Sequence[Function] = ()
    must_call: bool = False  # then there is no content
    parallel_calls: bool = True

    @property
    def has_form(self) -> bool:
        """True if content has a form."""
        return any(form is not None for form in (self.json_schema, self.regex, self.choice, self.grammar))


def unsupported_reason(tag: StructuralTag | None, has_functions: bool) -> str | None:
    """Return why answers with this tag, or the calls in them, cannot be constrained. None if they can."""
    if tag is None:
        return "this model's answers are messages with headers of a kind that cannot be constrained"
    if has_functions and tag.tool_call is None:
        return "this model's calls cannot be constrained: there is no grammar of their format"
    return None


def build_grammar(spec: StructuredOutputSpec, parser: OutputParser) -> str:
    """Return a grammar with one rule per line. `parser` has read the generation prompt. Raises InvalidRequest."""
    tag = parser.chat_format.structural_tag
    if tag is None or (spec.functions and tag.tool_call is None):
        raise InvalidRequest(unsupported_reason(tag, bool(spec.functions)) or "")
    if parser.state not in tag.start_states:
        raise InvalidRequest(f"the prompt has opened a {parser.state}, in which no answer of this model begins")
    rules, answers = [*tag.rules], []
    if spec.has_form and not spec.must_call:
        answers.append(f"{_reasoning_before(tag, parser)} {tag.content}")
    if tag.tool_call is not None and spec.functions:
        rules += _call_rules(spec, tag.tool_call)
        answers.append(f"{_reasoning_before(tag, parser)} calls")
    if spec.has_form and not spec.must_call:
        rules.append(f"{CONTENT}{_content_rule(spec)}")  # the last, because a grammar has many lines
    is_free = not spec.has_form and not spec.must_call
    return "\n".join([_OPTIONS, f"start: {tag.unconstrained if is_free else ' | '.join(answers)}", *rules])


def index_of_arguments(rule: str) -> int | None:
    """Return the index of the function whose parameters this line of the grammar describes."""
    found = _ARGUMENTS_RULE.match(rule)
    return int(found["index"]) if found else None


def _content_rule(spec: StructuredOutputSpec) -> str:
    """Return the rule of content. Raises InvalidRequest."""
    if spec.json_schema is not None:
        return json_rule(spec.json_schema, COMPACT)
    if spec.regex is not None:
        return regex_rule(spec.regex)
    if spec.choice is not None:
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
    grammar = spec.grammar or ""
    return f"%lark {{\n{gbnf.to_lark(grammar) if gbnf.is_gbnf(grammar) else grammar}\n}}"


def _reasoning_before(tag: StructuralTag, parser: OutputParser) -> str:
    """Return what may precede the answer: the rest of reasoning that the prompt opened, or the model's own."""
    if parser.state == "reasoning":
        return tag.rest_of_reasoning
    if not tag.reasoning or parser.has_reasoned:
        return ""
    return f"({tag.reasoning}){tag.reasoning_quantifier}"


def _call_rules(spec: StructuredOutputSpec, tag: ToolCallTag) -> list[str]:
    """Return the rules of the calls. Raises InvalidRequest."""
    choices = [tag.call_of(function.name, _arguments_rule(index)) for index, function in enumerate(spec.functions)]
    rules = [f"calls: {tag.opening} rest_of_calls", f"rest_of_calls: {tag.several if spec.parallel_calls else tag.one}"]
    rules.append(f"function: {' | '.join(choices)}")
    for index, function in enumerate(spec.functions):
        schema_type = function.parameters.get("type", "object")
        if schema_type != "object" and not (isinstance(schema_type, list) and "object" in schema_type):
            raise InvalidRequest(f"{ABOUT_PARAMETERS}{function.name!r}: expected a schema of objects")
        try:
            rules += tag.arguments(_arguments_rule(index), function.parameters, function.strict)
        except InvalidRequest as error:
            raise InvalidRequest(f"{ABOUT_PARAMETERS}{function.name!r}: {error.message}") from None
        except RecursionError:
            raise InvalidRequest(f"{ABOUT_PARAMETERS}{function.name!r} are nested too deeply") from None
    return rules


def _arguments_rule(index: int) -> str:
    return f"arguments_{index}"
