"""Put a body together with the kept responses that it continues, or of which its items are references. Pure."""

import re
from collections.abc import Mapping

from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.openai.response_items import items_of, numbered_items
from scorepool.api.dialects.openai.responses import MAX_ITEMS, InputItem, ResponseRequest
from scorepool.api.dialects.openai.responses_kept import job_id_of
from scorepool.api.dialects.openai.responses_reply import to_response
from scorepool.api.dialects.protocol import Previous

MAX_REFERRED = 256  # responses that one body refers to
PREVIOUS = "previous_response_id"
_ITEM_ID = re.compile(r"(msg|rs|fc|fco)_(?P<job>[0-9a-f]{32})_(in)?[0-9]{1,6}")


def previous_jobs(body: ResponseRequest) -> dict[str, str]:
    """Return the ids of the jobs that a body needs, each with the field that names it. Raise wire.Invalid."""
    found = {} if body.previous_response_id is None else {job_id_of(body.previous_response_id): PREVIOUS}
    for index, item in enumerate(items_of(body)):
        if item.type == "item_reference":
            match = _ITEM_ID.fullmatch(item.id or "")
            found.setdefault(match["job"] if match else "", f"input[{index}].id")
    if len(found) > MAX_REFERRED:
        message = f"input: expected references to items of at most {MAX_REFERRED} responses, found {len(found)}"
        raise wire.Invalid(message, "input")
    return found


def continued(body: ResponseRequest, previous: Mapping[str, Previous]) -> ResponseRequest:
    """Return the body with the items that it continues and refers to. Raise wire.Invalid."""
    fields = previous_jobs(body)
    conversations = {job_id: _conversation(job_id, each, fields[job_id]) for job_id, each in previous.items()}
    known = {item_id: item for each in conversations.values() for item_id, item in each}
    items = [_resolved(item, index, known) for index, item in enumerate(items_of(body))]
    field = "input"
    if body.previous_response_id is not None:
        field = PREVIOUS
        items = [item for _, item in conversations[job_id_of(body.previous_response_id)]] + items
    if len(items) > MAX_ITEMS:
        sentence = f"the conversation has {len(items)} items; expected at most {MAX_ITEMS}"
        raise wire.Invalid(f"{field}: {sentence}", field)
    try:
        return replace(body, input=items)
    except ValueError as error:  # too many calls together
        raise wire.Invalid(f"{field}: {error}", field) from None


def _conversation(job_id: str, previous: Previous, field: str) -> list[tuple[str, InputItem]]:
    """Return the items of a response with their ids, in order: what it was asked and its answer.

    `field` names the response. Raise wire.Invalid for an answer that no body may hold: a model calls with any JSON.
    """
    before = wire.parse(previous.kept_body, ResponseRequest, "msgpack")
    answer = to_response(before, previous.result, job_id, 0)
    try:
        answered = wire.parse(wire.encode_json(answer.output), list[InputItem])
    except wire.Invalid as error:
        raise wire.Invalid(f"{field}: the answer cannot be continued: output{error.message}", field) from None
    ids = [item.id for item in answer.output]
    return [*numbered_items(before, job_id), *zip(ids, answered, strict=True)]


def _resolved(item: InputItem, index: int, known: Mapping[str, InputItem]) -> InputItem:
    if item.type != "item_reference":
        return item
    found = known.get(item.id or "")
    if found is None:
        field = f"input[{index}].id"
        raise wire.Invalid(f"{field}: no such item: {wire.quote(item.id)} is none of its response's", field)
    return found
