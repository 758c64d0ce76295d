"""Parameters that clients of other servers send, of which the server supports only one value. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from scorepool.wire import encode_json


def check_supported(body: Struct, supported: Mapping[str, object]) -> None:
    """Check that each field is null or has its one supported value; raise ValueError."""
    for name, value in supported.items():
        if getattr(body, name) not in (None, value):
            raise ValueError(f"`{name}` is not supported here, expected {encode_json(value).decode()}")
