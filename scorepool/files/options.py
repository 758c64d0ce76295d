"""Check the options of a command as the server would, before any row is read."""

from typing import Any

from scorepool import wire
from scorepool.files.errors import BadInput


def check_options(request_type: type[wire.Score] | type[wire.Generate], **options: Any) -> None:
    """Check options that become the fields of a request. Raises BadInput, which names the option."""
    rows = {"prompt": "a"} if request_type is wire.Generate else {"items": [{"prompt": "a", "completion": "b"}]}
    request = {"model": "m", **rows, **options}
    try:
        try:
            wire.parse(wire.encode(request), request_type, "msgpack")
        except OverflowError:  # msgpack has no integers of more than 64 bits
            wire.parse(wire.encode_json(request), request_type)
    except wire.Invalid as error:
        field = error.field or ""
        option = "--" + field.partition("[")[0].replace("_", "-")
        raise BadInput(f"{option}: {error.message.removeprefix(field + ': ')}") from None
