"""What a request wants its answer to be, and the constraint that makes it so. Pure."""

from scorepool import wire
from scorepool.engine import Tokenizer
from scorepool.engine.errors import InvalidRequest
from scorepool.engine.sequence import Constraint
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from scorepool.worker.inference.chat_answer import Chat
from scorepool.worker.rq.errors import JobError

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def constraint_of(request: wire.Generate, chat: Chat | None, tokenizer: Tokenizer) -> Constraint | None:
    """A row's own: it holds how far the row has come. None: the answer is free. Raises JobError."""
    asks = _what_constrains(request)
    if asks is None:
        return None
    if request.ignore_eos or request.min_tokens:
        raise _failed("it says where the answer ends: give it neither `ignore_eos` nor `min_tokens`", asks)
    tools = callable_tools(request)
    if chat is not None and (reason := tokenizer.why_not_constrained(calls=bool(tools))):
        raise _failed(reason, asks)
    wanted = StructuredOutputSpec(
        json_schema=request.json_schema,
        functions=[_function(tool) for tool in tools],
        must_call=request.tool_choice == "required",
        may_call_several=request.parallel_tool_calls,
    )
    try:
        return tokenizer.constraint(wanted, None if chat is None else chat.opening)
    except InvalidRequest as error:
        raise _failed(error.message, "tools" if tools else "json_schema") from None


def callable_tools(request: wire.Generate) -> list[wire.Tool]:
    """Those that the answer may call; the model is shown the others, too."""
    if request.tool_choice == "none":
        return []
    return [tool for tool in request.tools if not request.allowed_tools or tool.name in request.allowed_tools]


def _function(tool: wire.Tool) -> Function:
    return Function(name=tool.name, parameters=tool.parameters or _NO_ARGUMENTS, strict=tool.strict)


def _what_constrains(request: wire.Generate) -> str | None:
    """The field that does. What is called follows each tool's schema, whichever it is."""
    tools = callable_tools(request)
    asks = {
        "tool_choice": request.tool_choice == "required",
        "allowed_tools": bool(tools and request.allowed_tools),
        "parallel_tool_calls": bool(tools and not request.parallel_tool_calls),
        "tools": any(tool.strict for tool in tools),
        "json_schema": request.json_schema is not None,
    }
    return next((field for field, does in asks.items() if does), None)


def _failed(reason: str, field: str) -> JobError:
    return JobError(wire.Failure(code="invalid", message=f"{field}: {reason}", field=field))
