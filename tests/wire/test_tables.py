"""Results as numpy arrays, Arrow tables, data frames, and short texts."""

import numpy as np
import pyarrow as pa
import pytest

from scorepool import wire
from scorepool.wire import extras
from scorepool.wire.result import SHOWN_CHARACTERS
from scorepool.wire.tables import SCHEMA

STAMP = wire.Provenance(
    model="demo",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu",
    versions={},
)
CALL = wire.ToolCallResult(id="c", name="f", arguments="{}", entry=2)
SCORED = wire.SequenceResult(
    text="a" * 100_000,
    token_ids=[0, 7, 2**31 - 1],
    token_bytes=[b"a", b"\xff", b""],
    logprobs=wire.Floats([None, -0.1, -9999.0]),
    ranks=[None, 1, 200_000],
    entropies=wire.Floats([None, 0.5, 0.25]),
    top_ids=[[], [7, 8], [9]],
    top_bytes=[[], [b"\xff", b"b"], [b"c"]],
    top_logprobs=[wire.Floats(), wire.Floats([-0.1, -3.0]), wire.Floats([-1.0])],
    logprob_sum=-9999.1,
    is_greedy=False,
    num_prompt_tokens=1,
    num_reported_prompt_tokens=1,
    prompt_token_ids=[5],
    clamped=1,
)
GENERATED = wire.SequenceResult(
    text="a'\n\u2028",
    token_ids=[1, 2, 3],
    token_bytes=[b"a", b"'", b"\n"],
    logprobs=wire.Floats([-1.0, -2.0, -3.0]),
    sampled_logprobs=wire.Floats([-0.5, -1.0, -1.5]),
    finish_reason="stop",
    stop_reason=3,
    skipped=[1],
    channels=["content", "content", "tool_call"],
    tool_calls=[CALL],
)
BARE = wire.SequenceResult(text="", token_ids=[], token_bytes=[], finish_reason="stop", stop_reason="END")


def result(*sequences: wire.SequenceResult) -> wire.Result:
    usage = wire.Usage(prompt_tokens=1, completion_tokens=1)
    return wire.Result(sequences=list(sequences), temperature=1.0, usage=usage, stamp=STAMP)


MIXED = result(SCORED, GENERATED, BARE)


def test_a_repr_shows_the_beginning_of_the_text_and_never_the_columns():
    assert repr(SCORED) == (
        f"<SequenceResult '{'a' * SHOWN_CHARACTERS}...', 3 tokens, logprob_sum=-9999.1000, is_greedy=False>"
    )
    assert repr(GENERATED) == "<SequenceResult \"a'\\n\\u2028\", 3 tokens, finish_reason='stop'>"


def test_the_repr_of_a_large_result_is_short():
    text = repr(result(*[SCORED] * 10_000))
    assert text.startswith("<Result of demo: 10000 sequences\n  <SequenceResult 'aaaa")
    assert text.endswith("\n  ... 9997 more>")
    assert len(text) < 600
    assert repr(result(BARE)) == ("<Result of demo: 1 sequence\n  <SequenceResult '', 0 tokens, finish_reason='stop'>>")


def test_numeric_columns_have_the_same_types_whatever_is_missing():
    columns = SCORED.numpy()
    assert {name: (column.shape, column.dtype) for name, column in columns.items()} == {
        "token_ids": ((3,), np.int64),
        "logprobs": ((3,), np.float32),
        "ranks": ((3,), np.float32),
        "entropies": ((3,), np.float32),
        "top_ids": ((3, 2), np.int64),
        "top_logprobs": ((3, 2), np.float32),
    }
    np.testing.assert_array_equal(columns["logprobs"], np.float32([np.nan, -0.1, -9999.0]))
    np.testing.assert_array_equal(columns["ranks"], np.float32([np.nan, 1, 200_000]))
    np.testing.assert_array_equal(columns["top_ids"], [[-1, -1], [7, 8], [9, -1]])
    np.testing.assert_array_equal(columns["top_logprobs"], np.float32([[np.nan] * 2, [-0.1, -3.0], [-1.0, np.nan]]))
    assert GENERATED.numpy().keys() == {"token_ids", "logprobs", "sampled_logprobs"}
    assert BARE.numpy()["token_ids"].shape == (0,)


def test_arrays_are_copies_that_may_be_changed():
    SCORED.numpy()["logprobs"][:] = 0.0
    assert SCORED.logprobs is not None
    assert SCORED.logprobs[2] == -9999.0


def test_a_table_has_a_row_per_sequence_and_a_column_per_field():
    table = MIXED.to_arrow()
    assert table.schema == SCHEMA
    assert set(table.column_names) == set(wire.SequenceResult.__struct_fields__)
    scored, generated, bare = table.to_pylist()
    assert scored["logprobs"] == [None, np.float32(-0.1), -9999.0]
    assert scored["ranks"] == [None, 1, 200_000]
    assert scored["top_logprobs"] == [[], [np.float32(-0.1), -3.0], [-1.0]]
    assert scored["top_bytes"] == [[], [b"\xff", b"b"], [b"c"]]
    assert scored["finish_reason"] is None
    assert [row["stop_reason"] for row in (scored, generated, bare)] == [None, "3", "END"]
    assert generated["tool_calls"] == [{"id": "c", "name": "f", "arguments": "{}", "entry": 2}]
    assert generated["logprob_sum"] is None
    assert bare["token_ids"] == []


def test_tables_of_different_results_can_be_joined():
    tables = [result(SCORED).to_arrow(), result(GENERATED).to_arrow(), result().to_arrow()]
    assert pa.concat_tables(tables).num_rows == 2


def test_a_data_frame_leaves_out_what_was_not_asked_for():
    frame = result(GENERATED, BARE).to_pandas()
    assert len(frame) == 2
    assert {"sampled_logprobs", "finish_reason", "stop_reason"} <= set(frame.columns)
    assert not {"logprob_sum", "ranks", "top_ids", "entropies", "is_greedy"} & set(frame.columns)
    scored = result(SCORED).to_pandas()
    assert list(scored["logprob_sum"]) == [-9999.1]
    np.testing.assert_array_equal(scored["logprobs"][0], np.float32([np.nan, -0.1, -9999.0]))
    assert len(result().to_pandas()) == 0


def test_a_result_is_the_same_from_msgpack_and_json():
    packed = wire.parse(wire.encode(MIXED), wire.Result, "msgpack")
    written = wire.parse(wire.encode_json(MIXED), wire.Result, "json")
    assert packed.to_arrow() == written.to_arrow() == MIXED.to_arrow()
    assert repr(packed) == repr(written) == repr(MIXED)
    for one, other in zip(packed.sequences, written.sequences, strict=True):
        assert one.numpy().keys() == other.numpy().keys()
        for name, column in one.numpy().items():
            np.testing.assert_array_equal(column, other.numpy()[name])


@pytest.mark.parametrize(
    ("method", "packages"),
    [("numpy", ["numpy"]), ("to_arrow", ["pyarrow"]), ("to_pandas", ["pandas", "pyarrow"])],
)
def test_a_missing_package_is_named_with_what_to_run(method: str, packages: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        getattr(SCORED if method == "numpy" else MIXED, method)()
    assert str(caught.value) == (f"`{method}()` needs {' and '.join(packages)}: run `pip install 'scorepool[tables]'`")


def test_arrays_have_the_columns_that_any_sequence_has():
    failure = wire.Failure(code="too_long", message="items[1]: has 9 tokens; at most 8 fit", field="items[1]")
    failed = wire.SequenceResult(text="", token_ids=[], token_bytes=[], failure=failure)
    arrays = result(SCORED, failed, GENERATED).arrays()

    nan = np.nan
    expected = {
        "lengths": [3, 0, 3],
        "token_ids": [SCORED.token_ids, [-1] * 3, [1, 2, 3]],
        "logprobs": np.float32([[nan, -0.1, -9999.0], [nan] * 3, [-1.0, -2.0, -3.0]]),
        "sampled_logprobs": np.float32([[nan] * 3, [nan] * 3, [-0.5, -1.0, -1.5]]),
        "ranks": [[0, 1, 200_000], [0] * 3, [0] * 3],
        "entropies": np.float32([[nan, 0.5, 0.25], [nan] * 3, [nan] * 3]),
        "top_ids": [[[-1, -1], [7, 8], [9, -1]], [[-1, -1]] * 3, [[-1, -1]] * 3],
        "top_logprobs": np.float32([[[nan] * 2, [-0.1, -3.0], [-1.0, nan]], [[nan] * 2] * 3, [[nan] * 2] * 3]),
    }
    assert arrays.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(arrays[name], column)
