"""List what a kept response was asked: the items of the whole conversation up to its answer. Pure."""

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.openai.response_object import FunctionCallItem, OutputText, ReasoningItem, ReasoningText
from scorepool.api.dialects.openai.responses import ContentPart, InputItem, ResponseRequest, Role

Order = Literal["asc", "desc"]
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class InputText(Struct, frozen=True, kw_only=True, tag="input_text"):
    """Give a text of the conversation."""

    text: str


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """Give the refusal of an earlier answer."""

    refusal: str


class InputImage(Struct, frozen=True, kw_only=True, tag="input_image"):
    """Give an image, as it was sent."""

    image_url: str
    detail: str = "auto"
    file_id: None = None


class PastMessage(Struct, frozen=True, kw_only=True, tag="message"):
    """Give a message of the conversation."""

    id: str
    role: Role
    status: Literal["completed"] = "completed"
    content: list[InputText | InputImage | OutputText | Refusal]


class CallOutput(Struct, frozen=True, kw_only=True, tag="function_call_output"):
    """Give the output of a call."""

    id: str
    call_id: str
    status: Literal["completed"] = "completed"
    output: str | list[InputText | InputImage]


ShownItem = PastMessage | FunctionCallItem | CallOutput | ReasoningItem


class ItemList(Struct, frozen=True, kw_only=True):
    """List items of a conversation."""

    object: Literal["list"] = "list"
    data: list[ShownItem]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Meta(description="True if more follow: `last_id` as `after` lists them.")]


def items_of(body: ResponseRequest) -> list[InputItem]:
    """Return the items of a body, of which the text of a user is one."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def to_item_list(body: ResponseRequest, job_id: str, after: str | None, limit: int, order: Order) -> ItemList:
    """List the items behind that with the id `after`. Raise wire.Invalid if there is none."""
    numbered = numbered_items(body, job_id)
    if order == "desc":
        numbered.reverse()
    if after is not None:
        ids = [item_id for item_id, _ in numbered]
        if after not in ids:
            raise wire.Invalid(
                f"after: expected the id of an item of this response, found {wire.quote(after)}", "after"
            )
        numbered = numbered[ids.index(after) + 1 :]
    data = [_shown(item, item_id) for item_id, item in numbered[:limit]]
    return ItemList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(numbered) > limit,
    )


def numbered_items(body: ResponseRequest, job_id: str) -> list[tuple[str, InputItem]]:
    """Return the items of a body with their ids."""
    return [(_item_id(item, job_id, number), item) for number, item in enumerate(items_of(body))]


def _item_id(item: InputItem, job_id: str, number: int) -> str:
    return f"{_PREFIXES[item.type]}_{job_id}_in{number}"


def _shown(item: InputItem, item_id: str) -> ShownItem:
    match item.type:
        case "function_call":
            return FunctionCallItem(
                id=item_id,
                status="completed",
                call_id=item.call_id or "",
                name=item.name or "",
                arguments=wire.encode_json(item.arguments).decode(),
            )
        case "function_call_output":
            output = item.output or ""
            shown = output if isinstance(output, str) else _parts(output)
            return CallOutput(id=item_id, call_id=item.call_id or "", output=shown)
        case "reasoning":
            texts = item.content or item.summary or ""
            pieces = [texts] if isinstance(texts, str) else [part.text or "" for part in texts]
            content = [ReasoningText(text=piece) for piece in pieces if piece]
            return ReasoningItem(id=item_id, status="completed", content=content)
        case _:
            return _message(item, item_id)


def _message(item: InputItem, item_id: str) -> PastMessage:
    assert item.role is not None
    assert item.content is not None
    content = item.content
    shown: list[InputText | InputImage | OutputText | Refusal]
    if item.role == "assistant":
        parts = [ContentPart(type="output_text", text=content)] if isinstance(content, str) else content
        shown = [_answered(part) for part in parts]
    else:
        shown = [InputText(text=content)] if isinstance(content, str) else [*_parts(content)]
    return PastMessage(id=item_id, role=item.role, content=shown)


def _answered(part: ContentPart) -> OutputText | Refusal:
    return Refusal(refusal=part.refusal or "") if part.type == "refusal" else OutputText(text=part.text or "")


def _parts(parts: Iterable[ContentPart]) -> list[InputText | InputImage]:
    return [
        InputImage(image_url=part.image_url or "", detail=part.detail or "auto")
        if part.type == "input_image"
        else InputText(text=(part.refusal if part.type == "refusal" else part.text) or "")
        for part in parts
    ]
