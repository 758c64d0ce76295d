"""Parameters that clients send, of which one value alone can be had here: another is refused by its name. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from scorepool.wire import encode_json


def check_only(body: Struct, only: Mapping[str, object]) -> None:
    """Null asks for nothing. Raises ValueError."""
    for name, value in only.items():
        if getattr(body, name) not in (None, value):
            raise ValueError(f"`{name}` is not supported here, expected {encode_json(value).decode()}")
