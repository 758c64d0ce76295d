"""Convert the messages and tools of a request to the shape that chat templates read. Pure.

The shape is OpenAI's with two differences: a call's arguments are an object, and a `tool` message has the name of the
function that it answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scorepool import wire


def to_template_messages(messages: Sequence[wire.Message]) -> list[dict[str, Any]]:
    name_of_call = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_to_template_message(message, name_of_call) for message in messages]


def _to_template_message(message: wire.Message, name_of_call: Mapping[str, str]) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": _content(message)}
    name = message.name
    if name is None and message.role == "tool":
        name = name_of_call.get(message.tool_call_id or "")
    if name is not None:
        converted["name"] = name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        converted["reasoning_content"] = message.reasoning_content
        if not message.content:
            converted["thinking"] = message.reasoning_content  # gpt-oss's field; its template refuses it beside content
    if message.tool_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return converted


def _content(message: wire.Message) -> str | list[dict[str, str]]:
    """Return a message's text; with images, texts and images in their order, as OpenAI's parts."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    last = 0
    for image in message.images:
        parts += [
            {"type": "text", "text": message.content[last : image.at]},
            {"type": "video" if image.is_video else "image"},
        ]
        last = image.at
    parts.append({"type": "text", "text": message.content[last:]})
    return [part for part in parts if part.get("text") != ""]


def to_template_tool(tool: wire.Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",  # some templates fail without one
        "parameters": tool.parameters or {"type": "object", "properties": {}},  # none, as in OpenAI's API
    }
    return {"type": "function", "function": function}
