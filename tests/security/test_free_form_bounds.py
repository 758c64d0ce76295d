"""Schemas and arguments are bounded in each job, and in each body, before one of them is built."""

import tracemalloc

import msgspec
import pytest

from scorepool import wire
from scorepool.api.routes.jobs import Bulk

MIB = 2**20


def chat(num_tools: int, num_bytes: int) -> dict[str, object]:
    """Return a chat with tools whose parameters take so many bytes each."""
    parameters = {"a": "x" * num_bytes}
    tools = [{"name": f"t{number}", "parameters": parameters} for number in range(num_tools)]
    return {"type": "generate", "model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}


def check(message: object, message_type: object, message_format: wire.Format) -> None:
    module = msgspec.json if message_format == "json" else msgspec.msgpack
    wire.check_free_form(module.encode(message), message_type, message_format)


@pytest.mark.parametrize("message_format", ["json", "msgpack"])
def test_the_tools_of_one_job_have_a_bound_together(message_format: wire.Format):
    check(chat(10, MIB // 10 - 100), wire.Request, message_format)
    with pytest.raises(wire.Invalid, match=r"tools\[10\].parameters: .* at most 1048576 bytes .* in one job"):
        check(chat(11, MIB // 10 - 100), wire.Request, message_format)


def test_the_jobs_of_one_body_have_a_bound_together():
    check([chat(1, MIB - 100)] * 7, Bulk, "json")
    with pytest.raises(wire.Invalid, match=r"\[1\].tools\[10\].parameters: .* at most 1048576 bytes .* in one job"):
        check([chat(1, 10), chat(11, MIB // 10 - 100)], Bulk, "json")
    with pytest.raises(wire.Invalid, match=r"\[8\].* at most 8388608 bytes .* together, found more; send several"):
        check([chat(1, MIB - 100)] * 9, Bulk, "json")


def test_empty_lists_of_msgpack_take_no_more_memory_than_those_of_json():
    empty = chat(1, 0) | {"tools": [{"name": "t", "parameters": {"a": [[]] * 9000}}]}
    body = msgspec.msgpack.encode([empty] * 900)
    tracemalloc.start()
    try:
        with pytest.raises(wire.Invalid, match=r"at most 1048576 bytes .* together"):
            wire.check_free_form(body, Bulk, "msgpack")
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


LISTS_AS_KEYS = {(1, 2): 0}  # n of them can be chosen so that they take n^2 steps to build


def test_lists_as_keys_of_msgpack_are_refused_before_they_are_built():
    for value in ({"a": LISTS_AS_KEYS}, {"a": [{"b": LISTS_AS_KEYS}]}):
        tools = [{"name": "t", "parameters": value}]
        with pytest.raises(wire.Invalid, match=r"tools\[0\].parameters: .* whose objects have strings as keys"):
            check(chat(1, 0) | {"tools": tools}, wire.Request, "msgpack")


@pytest.mark.parametrize("body", [LISTS_AS_KEYS, {"type": "generate", "model": LISTS_AS_KEYS}])
def test_lists_as_keys_of_msgpack_are_not_built_for_an_error(body: object):
    with pytest.raises(wire.Invalid) as caught:
        wire.parse(msgspec.msgpack.encode(body), wire.Request, "msgpack")
    assert "(1, 2)" not in caught.value.message


def test_values_of_msgpack_are_as_deep_as_check_json_allows():
    deep: dict[str, object] = {}
    for _ in range(64):
        deep = {"a": deep}
    check(chat(1, 0) | {"tools": [{"name": "t", "parameters": deep}]}, wire.Request, "msgpack")
    tools = [{"name": "t", "parameters": {"a": [deep]}}]
    with pytest.raises(wire.Invalid, match="nested more than 64 deep"):
        check(chat(1, 0) | {"tools": tools}, wire.Request, "msgpack")
