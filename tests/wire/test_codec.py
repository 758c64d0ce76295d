"""The codec: messages survive JSON and msgpack, and errors name field, value and expectation."""

import json
import math
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from scorepool import wire
from scorepool.wire.request_fields import MAX_TOOL_CALLS
from tests.images import png_header

PROVENANCE = wire.Provenance(
    model="m",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu",
    versions={},
)
float32 = st.floats(width=32, allow_nan=False)


def result(**columns: object) -> wire.Result:
    sequence = wire.SequenceResult(token_ids=[1, 2], token_bytes=[b"\xf0\x9f", b"b"], text="b", **columns)
    usage = wire.Usage(prompt_tokens=1, completion_tokens=2)
    return wire.Result(sequences=[sequence], temperature=1.0, usage=usage, stamp=PROVENANCE)


@given(st.lists(st.none() | float32))
def test_a_column_is_the_same_after_msgpack_and_after_json(values: list[float | None]):
    column = wire.Floats(values)
    assert wire.Floats.unpack(column.pack()).values() == values
    finite = [value for value in values if value is None or math.isfinite(value)]
    assert msgspec.json.decode(wire.encode_json(wire.Floats(finite))) == finite


def test_a_packed_column_is_little_endian_float32():
    assert wire.Floats([-1.5, None]).pack()[:4] == struct.pack("<f", -1.5)
    assert len(wire.Floats([-1.5, None]).pack()) == 8


def test_a_result_is_the_same_after_msgpack():
    sent = result(
        logprobs=wire.Floats([None, -0.1]), top_ids=[[], [3]], top_logprobs=[wire.Floats(), wire.Floats([-0.1])]
    )
    assert repr(wire.decode_outcome(wire.encode(sent))) == repr(sent)


def test_the_logprob_of_a_token_equals_its_top_logprob_exactly_in_json():
    sent = result(logprobs=wire.Floats([None, -0.1]), top_logprobs=[wire.Floats(), wire.Floats([-0.1])])
    columns = msgspec.json.decode(wire.encode_json(sent))["sequences"][0]
    assert columns["logprobs"] == [None, columns["top_logprobs"][1][0]]


def test_a_slice_has_the_entries_of_its_tokens_in_every_streamed_column():
    columns = {
        "token_ids": [1, 2, 3],
        "token_bytes": [b"a", b"b", b"c"],
        "logprobs": wire.Floats([None, -0.5, -1.5]),
        "top_ids": [[], [2], [4]],
        "top_bytes": [[], [b"b"], [b"d"]],
        "top_logprobs": [wire.Floats(), wire.Floats([-0.5]), wire.Floats([-0.25])],
        "target_logprobs": [wire.Floats(), wire.Floats([-2.5]), wire.Floats([-3.5])],
    }
    assert columns.keys() == set(wire.StreamedColumns.__struct_fields__)
    delta = wire.TokenDelta(id="j", sequence=0, first=0, **columns)

    sliced = delta.columns(1, 3)

    assert sliced == {name: column[1:3] for name, column in columns.items()}
    assert wire.encode(replace(delta, **sliced))  # each column keeps its type
    assert (
        wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"]).columns(1)["logprobs"] is None
    )


def test_a_failure_is_the_same_after_msgpack():
    sent = wire.Failure(code="too_long", message="1025 tokens, the model takes 1024", field="items[0]")
    assert wire.decode_outcome(wire.encode(sent)) == sent


SCORE = {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": "b"}]}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_request_is_the_same_in_json_and_in_msgpack(encoding: str):
    body = msgspec.json.encode(SCORE) if encoding == "json" else msgspec.msgpack.encode(SCORE)
    request = wire.parse(body, wire.Request, encoding)
    assert request == wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")])
    assert wire.decode_request(wire.encode(request)) == request


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"top_logprobs": 1025}, "top_logprobs", "<= 1024, found 1025"),
        ({"top_logprobs": True}, "top_logprobs", "got `bool`, found True"),
        ({"temperature": 0}, "temperature", "found 0"),
        ({"temperature": 1e-300}, "temperature", "found 1e-300"),
        ({"temprature": 1}, "temprature", "unknown field `temprature`"),
        ({"items": []}, "items", "length >= 1, found []"),
        ({"items": [{"prompt": "a"}]}, "items[0].completion", "missing required field `completion`"),
        ({"items": [{"prompt": "a", "completion": [1]}]}, "items[0]", "both be text or both be token ids"),
        ({"items": [{"prompt": "a", "completion": ""}]}, "items[0].completion", "length >= 1, found ''"),
        ({"items": [{"prompt": [1, -2], "completion": [3]}]}, "items[0].prompt[1]", ">= 0, found -2"),
        ({"items": [{"prompt": [], "completion": [3]}]}, "items[0].prompt", "length >= 1, found []"),
        ({"model": "../etc"}, "model", "found '../etc'"),
        ({"model": "demo\n"}, "model", "found 'demo\\n'"),
        (
            {"type": "scor"},
            "type",
            "Expected 'classify' | 'compare' | 'embed' | 'generate' | 'score' | 'tokenize', found 'scor'",
        ),
        ({"score": "both"}, "score", "Expected 'all' | 'completion', found 'both'"),
        ({"k" * 1000: 1}, "k" * 77 + "...", "unknown field"),
        ({"timeout_s": 0}, "timeout_s", ">= 1, found 0"),
        ({"priority": "urgent"}, "priority", "Expected 'high' | 'low' | 'normal', found 'urgent'"),
    ],
)
def test_an_error_names_field_value_and_expectation(change: dict[str, object], field: str, message: str):
    with pytest.raises(wire.Invalid) as caught:
        wire.parse(msgspec.json.encode({**SCORE, **change}), wire.Request)
    assert caught.value.field == field
    assert message in caught.value.message
    assert len(caught.value.message) < 300


def test_an_error_says_once_what_was_found():
    request = {"type": "generate", "model": "demo", "prompt": "a", "images": [{"data": png_header(1, 1)}]}
    with pytest.raises(wire.Invalid, match=r"^images\[0\]: expected an image of at least 4 x 4 pixels, found 1 x 1$"):
        wire.parse(msgspec.json.encode(request), wire.Request)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'"\xff"', b"{} {}", b'{"type":"score","model":"\\ud800"}']
)
def test_malformed_json_raises_invalid_and_no_other_error(body: bytes):
    with pytest.raises(wire.Invalid):
        wire.parse(body, wire.Request)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_invalid(body: bytes):
    for decode, kind in ((wire.decode_request, wire.Request), (wire.decode_outcome, wire.Outcome)):
        try:
            decoded = decode(body)
        except wire.Invalid as error:
            decoded = error
        assert isinstance(decoded, kind | wire.Invalid)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_in_msgpack(value: float):
    with pytest.raises(wire.Invalid) as caught:
        wire.parse(msgspec.msgpack.encode({**SCORE, "temperature": value}), wire.Request, "msgpack")
    assert caught.value.field == "temperature"


@pytest.mark.parametrize(("num_messages", "is_accepted"), [(2, True), (3, False)])
def test_the_tool_calls_of_a_whole_chat_are_bounded(num_messages: int, is_accepted: bool):
    call = {"id": "a", "name": "f", "arguments": {}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * (MAX_TOOL_CALLS // 2)}
    for kind in ("generate", "tokenize"):
        body = json.dumps({"type": kind, "model": "demo", "messages": [message] * num_messages}).encode()
        if is_accepted:
            assert wire.parse(body, wire.Request)
        else:
            with pytest.raises(wire.Invalid, match="1536 tool calls in all; expected at most 1024"):
                wire.parse(body, wire.Request)


@pytest.mark.parametrize("value", [None, True, 5, 0.5, "a'b", b"a", [], [1, "a"], {}, {"a": [1], 2: None}, [[[]]]])
def test_a_short_value_is_quoted_as_its_repr(value: object):
    assert wire.quote(value) == repr(value)


@pytest.mark.parametrize(
    "value", ["a" * 10**6, b"a" * 10**6, [0] * 10**6, {"a" * 10**6: 0}, [["b" * 10**6]], dict.fromkeys(range(10**5))]
)
def test_a_long_value_is_cut_before_it_is_quoted(value: object):
    tracemalloc.start()
    try:
        quoted = wire.quote(value)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()
    assert (len(quoted), quoted[:77], quoted[77:]) == (80, repr(value)[:77], "...")


@pytest.mark.parametrize("name", ["a" * 10**6, " - at `$" * 10**5, "`" * 10**6, " - at `$" * 10**5 + "\n"])
def test_the_error_for_a_long_unknown_field_is_short(name: str):
    with pytest.raises(wire.Invalid) as caught:
        wire.parse(msgspec.json.encode({"type": "score", "model": "demo", "items": [], name: 1}), wire.Request)
    assert len(caught.value.message) < 1200
