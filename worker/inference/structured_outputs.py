"""Build the constraint that makes an answer what its request asks for. Pure."""

from collections.abc import Sequence

from scorepool import wire
from scorepool.engine import ChatCodec
from scorepool.engine.errors import InvalidRequest
from scorepool.engine.sequence import Constraint
from scorepool.engine.text.chat.grammar import ABOUT_PARAMETERS, Function, StructuredOutputSpec
from scorepool.wire.request_fields import FORMS
from scorepool.worker.inference.chat_answer import ChatPrompt
from scorepool.worker.rq.errors import JobError

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def constraints_of(
    request: wire.Generate, prompt: ChatPrompt | None, codec: ChatCodec, owner: str
) -> Sequence[Constraint | None]:
    """Return the constraint of each of `n` sequences, or None for each if the answer is free. Raises JobError.

    A constraint holds how far its sequence has come, so sequences cannot share one. None is compiled yet.
    """
    field = _constraining_field(request)
    if field is None:
        return [None] * request.n
    if request.ignore_eos or request.min_tokens:
        raise _invalid("it determines where the answer ends: give neither `ignore_eos` nor `min_tokens`", field)
    if request.allowed_token_ids is not None or request.bad_words:
        raise _invalid("it determines which tokens may follow: give neither `allowed_token_ids` nor `bad_words`", field)
    tools = callable_tools(request)
    compiler = codec.grammar_compiler
    if prompt is not None and (reason := compiler.unsupported_reason(has_functions=bool(tools))):
        raise _invalid(reason, field)
    spec = StructuredOutputSpec(
        json_schema=request.json_schema,
        regex=request.regex,
        choice=request.choice,
        grammar=request.grammar,
        functions=[_function(tool) for tool in tools],
        must_call=request.tool_choice == "required",
        parallel_calls=request.parallel_tool_calls,
    )
    try:
        return compiler.constraints(spec, None if prompt is None else prompt.generation_prompt, owner, request.n)
    except InvalidRequest as error:
        raise invalid_grammar(request, error) from None


def invalid_grammar(request: wire.Generate, error: InvalidRequest) -> JobError:
    """Return the error of a job whose schema or tools cannot be followed."""
    form = next((form for form in FORMS if getattr(request, form) is not None), None)
    is_of_tools = form is None or error.message.startswith(ABOUT_PARAMETERS)
    return _invalid(error.message, "tools" if is_of_tools else form or "")


def callable_tools(request: wire.Generate) -> list[wire.Tool]:
    """Return the tools that the answer may call. The prompt also shows the others."""
    if request.tool_choice == "none":
        return []
    return [tool for tool in request.tools if not request.allowed_tools or tool.name in request.allowed_tools]


def _function(tool: wire.Tool) -> Function:
    return Function(name=tool.name, parameters=tool.parameters or _NO_ARGUMENTS, strict=tool.strict)


def _constraining_field(request: wire.Generate) -> str | None:
    """Return the first field that constrains the answer. Then every call follows its tool's schema, strict or not."""
    tools = callable_tools(request)
    constrains = {
        "tool_choice": request.tool_choice == "required",
        "allowed_tools": bool(tools and request.allowed_tools),
        "parallel_tool_calls": bool(tools and not request.parallel_tool_calls),
        "tools": any(tool.strict for tool in tools),
        **{form: getattr(request, form) is not None for form in FORMS},
    }
    return next((field for field, does in constrains.items() if does), None)


def _invalid(reason: str, field: str) -> JobError:
    return JobError(wire.Failure(code="invalid", message=f"{field}: {reason}", field=field))
