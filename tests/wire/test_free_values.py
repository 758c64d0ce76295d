"""Schemas and arguments may be any JSON, but neither deep nor anything that only msgpack has."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec
import pytest

from scorepool import wire
from scorepool.wire.request_fields import MAX_DEPTH


def nested(depth: int) -> dict[str, Any]:
    return reduce(lambda inner, _: {"a": inner}, range(depth), dict[str, Any]())


def of_arguments(value: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "1", "name": "look", "arguments": value}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


def of_parameters(value: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ""}], "tools": [{"name": "look", "parameters": value}]}


def of_schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "a", "json_schema": value}


PLACES = [of_arguments, of_parameters, of_schema]


def decode(fields: dict[str, Any]) -> wire.Request:
    return wire.decode_request(msgspec.msgpack.encode({"type": "generate", "model": "m", **fields}))


@pytest.mark.parametrize("place", PLACES)
def test_a_value_as_deep_as_allowed_is_taken(place: Callable[[dict[str, Any]], dict[str, Any]]):
    decode(place(nested(MAX_DEPTH)))
    decode(place({"a": [1, 1.5, None, True, "b", {"c": []}]}))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 950, 5000])
def test_a_deeper_value_is_invalid(place: Callable[[dict[str, Any]], dict[str, Any]], depth: int):
    """Beyond about 900 levels, fewer below pytest's own calls, msgspec stops before ours counts them."""
    request = {"type": "generate", "model": "m", **place({"a": "HERE"})}
    body = msgspec.msgpack.encode(request).replace(b"\xa4HERE", b"\x81\xa1a" * depth + b"\x80")
    with pytest.raises(wire.Invalid, match=r"nested more than 64 deep|recursion depth"):
        wire.decode_request(body)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "value", [msgspec.msgpack.Ext(5, b"a" * 1000), msgspec.msgpack.Ext(-1, b"\0" * 4), b"bytes", float("nan"), {1: 2}]
)
def test_a_value_that_json_cannot_hold_is_invalid(place: Callable[[dict[str, Any]], dict[str, Any]], value: object):
    with pytest.raises(wire.Invalid, match=r"that JSON cannot hold|not all strings") as caught:
        decode(place({"a": [value]}))
    assert len(str(caught.value)) < 400
