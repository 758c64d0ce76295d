"""What a caller wants of an answer, as a grammar: JSON of a schema, calls of functions, or either. No mlx.

How the model spells such an answer is its form's; here is what it may consist of, and in what order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.output_parser import OutputParser
from scorepool.engine.text.chat.structural_tag import StructuralTag, ToolCallTag

# Where one text alone may follow, llguidance would have its own tokens for it, and take markers for them.
_OPTIONS = '%llguidance {"no_forcing": true}'
_COMPACT: dict[str, Any] = {"whitespace_flexible": False}  # else a model may write spaces until its tokens are used up
_AS_SHOWN = _COMPACT | {"item_separator": ", ?", "key_separator": ": ?"}  # templates write a call's with spaces
_AS_FAR_AS_POSSIBLE = {"lenient": True, "coerce_one_of": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    parameters: Mapping[str, Any]  # JSON Schema of an object
    strict: bool = False  # else keywords and formats that cannot be followed are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputSpec:
    """Content that is JSON of a schema, calls of these functions, or either. Without a schema content is free."""

    json_schema: Mapping[str, Any] | None = None
    functions: Sequence[Function] = ()
    must_call: bool = False  # then there is no content
    may_call_several: bool = True


def why_not(form: StructuralTag | None, calls: bool) -> str | None:
    """Why answers of this form are not constrained, or calls in them; None: they are."""
    if form is None:
        return "this model's answers are messages with headers of a kind that is not constrained"
    if calls and form.calls is None:
        return "what this model calls is not constrained, for it writes calls in a form that is not known to be JSON"
    return None


def grammar_of(wanted: StructuredOutputSpec, reader: OutputParser) -> str:
    """A rule a line. `reader` has read what the prompt ends with. Raises InvalidRequest."""
    form = reader.markup.form
    if form is None or (wanted.functions and form.calls is None):
        raise InvalidRequest(why_not(form, bool(wanted.functions)) or "")
    if reader.state not in form.begins:
        raise InvalidRequest(f"the prompt has opened a {reader.state}, where no answer of this model begins")
    rules, answers = [*form.rules], []
    if wanted.json_schema is not None and not wanted.must_call:
        rules.append(f"content: {_json(wanted.json_schema, _COMPACT)}")
        answers.append(f"{_before(form, reader)} {form.content}")
    if form.calls is not None and wanted.functions:
        rules += _call_rules(wanted, form.calls)
        answers.append(f"{_before(form, reader)} calls")
    is_free = wanted.json_schema is None and not wanted.must_call
    return "\n".join([_OPTIONS, f"start: {form.free if is_free else ' | '.join(answers)}", *rules])


def function_at(wanted: StructuredOutputSpec, rule: str) -> Function | None:
    """The function whose parameters are in this line of the grammar."""
    names = {f"{_arguments(place)}:": function for place, function in enumerate(wanted.functions)}
    return names.get(rule.partition(" ")[0])


def _before(form: StructuralTag, reader: OutputParser) -> str:
    """What comes before an answer: the rest of what the prompt opened, or what the model may begin with."""
    if reader.state == "reasoning":
        return form.rest
    if not form.reasoning or reader.has_reasoned:
        return ""
    return f"({form.reasoning}){form.times}"


def _call_rules(wanted: StructuredOutputSpec, calls: ToolCallTag) -> list[str]:
    """Raises InvalidRequest."""
    choices = [calls.function(function.name, _arguments(place)) for place, function in enumerate(wanted.functions)]
    rules = [f"calls: {calls.several if wanted.may_call_several else calls.one}", f"function: {' | '.join(choices)}"]
    for place, function in enumerate(wanted.functions):
        kind = function.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise InvalidRequest(f"the parameters of {function.name!r}: expected a schema of objects")
        options = _AS_SHOWN if function.strict else _AS_SHOWN | _AS_FAR_AS_POSSIBLE
        rules.append(f"{_arguments(place)}: {_json({**function.parameters, 'type': 'object'}, options)}")
    return rules


def _arguments(place: int) -> str:
    return f"arguments_{place}"


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Raises InvalidRequest."""
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except RecursionError:
        raise InvalidRequest("a schema is nested too deeply") from None
