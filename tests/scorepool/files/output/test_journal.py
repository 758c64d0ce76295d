"""OUT and the files beside it: each row once, whatever ends a process."""

import json
import resource
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from scorepool.files.errors import BadInput, OutputError
from scorepool.files.file_run import output_to
from scorepool.files.formats.arrow_files import ArrowSink
from scorepool.files.formats.registry import make_sink, open_source
from scorepool.files.formats.sinks import CsvSink, JsonlSink
from scorepool.files.output.journal import JournaledOutput
from scorepool.files.rows import Done, Row

CODED = pa.dictionary(pa.int8(), pa.string())
COMMAND = {"FILE": "in.jsonl", "--model": "demo"}


def done(number: int, reason: str = "") -> Done:
    row = Row(number, number + 1, 10 * number, {"a": number})
    return Done(row, None if reason else {"b": -number}, reason, num_tokens=3)


def opened(out: Path, *, overwrite: bool = False, **command: Any) -> JournaledOutput:
    sink = CsvSink() if out.suffix == ".csv" else JsonlSink()
    return JournaledOutput(out, sink, COMMAND | command, overwrite)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_what_was_written_after_the_last_checkpoint_is_cut_off(tmp_path: Path, name: str):
    out = tmp_path / name
    first = opened(out)
    first.write([done(1), done(2, "bad")])
    first.save()
    first.write([done(3), done(4, "bad")])
    first.close()

    second = opened(out)
    assert second.run_id == first.run_id
    assert (second.counts.num_rows, second.counts.num_failed, second.counts.num_tokens) == (2, 1, 6)
    assert second.counts.position == 20
    second.write([done(3), done(4, "bad")])
    second.finish()
    second.close()

    expected = {"out.jsonl": '{"a":1,"b":-1}\n{"a":3,"b":-3}\n', "out.csv": "a,b\n1,-1\n3,-3\n"}
    assert out.read_text() == expected[name]
    errors = [json.loads(line) for line in second.errors_path.read_text().splitlines()]
    assert errors == [{"row": row, "line": row + 1, "reason": "bad", "input": {"a": row}} for row in (2, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.errors.jsonl"]


def test_a_parquet_file_goes_on_after_a_checkpoint_and_names_rows_of_other_types(tmp_path: Path):
    out = tmp_path / "out.parquet"
    first = JournaledOutput(out, ArrowSink(None, (), is_parquet=True), COMMAND, overwrite=False)
    first.write([done(1)])
    first.save()
    first.write([done(2)])
    first.close()

    second = JournaledOutput(out, ArrowSink(None, (), is_parquet=True), COMMAND, overwrite=False)
    other_type = Done(Row(3, 3, 30, {"a": "text"}), {"b": 1})
    other_column = Done(Row(4, 4, 40, {"a": 1, "c": 1}), {"b": 1})
    second.write([done(2), other_type, other_column])
    second.finish()
    second.close()

    assert pq.read_table(out).to_pylist() == [{"a": 1, "b": -1}, {"a": 2, "b": -2}]
    errors = [json.loads(line) for line in second.errors_path.read_text().splitlines()]
    assert [error["row"] for error in errors] == [3, 4]
    assert all(error["reason"].startswith("the row does not fit the types of the first rows") for error in errors)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("in.parquet", b"PAR1 cut", "in.parquet is not a Parquet file, or it was cut"),
        ("in.arrow", b"ARROW1 cut", "in.arrow is not an Arrow file, or it was cut"),
        ("in.arrow", b"cut", "in.arrow is not an Arrow file, or it was cut"),
    ],
)
def test_a_columnar_file_that_was_cut_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=sentence), open_source(str(tmp_path / name), None):
        pass


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_process_that_ends_while_it_finishes_loses_nothing(tmp_path: Path, is_renamed: bool):
    out = tmp_path / "out.jsonl"
    first = opened(out)
    first.write([done(1)])
    first._checkpoint.is_complete = True
    first.save()
    first.close()
    if is_renamed:
        (tmp_path / "out.jsonl.partial").rename(out)

    second = opened(out)
    assert second.is_complete
    second.finish()
    second.close()
    assert out.read_text() == '{"a":1,"b":-1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_that_exists_is_replaced_only_if_asked(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with pytest.raises(BadInput, match=r"out\.jsonl exists: give another -o, or --overwrite"):
        opened(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]

    output = opened(out, overwrite=True)
    output.write([done(1)])
    output.save()
    output.close()
    assert out.read_text() == "old"  # until every row is done

    output = opened(out)  # which goes on, so it needs no leave again
    output.finish()
    output.close()
    assert out.read_text() == '{"a":1,"b":-1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_that_was_made_meanwhile_is_not_replaced(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    opened(out).close()
    out.write_text("another program's")
    with pytest.raises(BadInput, match="exists"):
        opened(out)
    assert (tmp_path / "out.jsonl.journal").exists()


def test_an_old_output_goes_even_if_every_row_fails(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    output = opened(out, overwrite=True)
    output.write([done(1, "bad")])
    output.finish()
    output.close()
    assert out.read_text() == ""


def test_another_command_does_not_go_on(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    opened(out).close()
    with pytest.raises(BadInput, match="was begun with --model 'demo' and cannot go on with 'other'"):
        opened(out, **{"--model": "other"})
    opened(out, overwrite=True, **{"--model": "other"}).close()
    (tmp_path / "out.jsonl.journal").write_text("{")
    with pytest.raises(BadInput, match="is damaged"):
        opened(out)


@pytest.mark.parametrize(("begun_as", "other"), [(None, "csv"), ("csv", "tsv"), ("parquet", "arrow")])
def test_another_format_does_not_go_on(tmp_path: Path, begun_as: str | None, other: str):
    path, out = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    path.write_text('{"a": 1}\n')
    with open_source(str(path), None) as source:
        first = output_to(out, begun_as, overwrite=False)(source, ("b",), COMMAND)
        first.write([done(1)])
        first.save()
        first.close()
        with pytest.raises(BadInput, match=f"begun with --output-format '{begun_as or 'jsonl'}' and cannot go on with"):
            output_to(out, other, overwrite=False)(source, ("b",), COMMAND)
        same = output_to(out, begun_as, overwrite=False)(source, ("b",), COMMAND)
        assert same.counts.num_rows == 1
        same.close()


def test_two_processes_do_not_write_one_output(tmp_path: Path):
    output = opened(tmp_path / "out.jsonl")
    with pytest.raises(BadInput, match="another process is writing"):
        opened(tmp_path / "out.jsonl")
    output.close()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_nothing_that_was_done(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    output = opened(out)
    output.write([done(1)])
    output.save()
    many = [done(number) for number in range(2, 200)]
    with (
        largest_file(1000),
        pytest.raises(OutputError, match=r"cannot write .*: File too large; what was done is kept"),
    ):
        output.write(many)
    output.save()
    output.close()

    again = opened(out)
    assert again.counts.num_rows == 1
    again.write(many)
    again.finish()
    again.close()
    assert [json.loads(line)["a"] for line in out.read_text().splitlines()] == list(range(1, 200))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match=r"cannot write .*no/out\.jsonl: there is no folder .*no; nothing was done"):
        opened(tmp_path / "no" / "out.jsonl")


def test_the_errors_hold_the_beginning_of_a_long_row(tmp_path: Path):
    output = opened(tmp_path / "out.jsonl")
    output.write(
        [Done(Row(1, 1, 10, {"a": "é" * 10_000}), reason="bad"), Done(Row(2, 2, 20, None, "no JSON"), reason="no JSON")]
    )
    output.finish()
    output.close()
    long, unreadable = map(json.loads, output.errors_path.read_text().splitlines())
    assert long["input"].startswith('{"a":"éé')
    assert long["input"].endswith("é...")
    assert 4000 < len(long["input"].encode()) < 4200
    assert "input" not in unreadable


@pytest.mark.parametrize("make_writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_columnar_file_that_is_damaged_in_the_middle_is_read_up_to_there(tmp_path: Path, make_writer: Any):
    table = pa.table({"a": range(2000)})
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file, make_writer(file, table.schema) as writer:
        writer.write_table(table, 1000)
    data = (tmp_path / "in.arrow").read_bytes()
    if make_writer is pa.ipc.new_stream:
        data = data[: len(data) * 3 // 4]
    else:
        second = data.rindex(b"\xff\xff\xff\xff", 0, len(data) * 3 // 4)  # the first bytes of the second batch
        data = data[:second] + b"\x7f" * 64 + data[second + 64 :]
    (tmp_path / "in.arrow").write_bytes(data)
    with open_source(str(tmp_path / "in.arrow"), None) as source:
        *rows, last = source.rows
    assert [row.values for row in rows] == table.to_pylist()[:1000]
    assert (last.number, last.values) == (1001, None)
    assert "in.arrow cannot be read from row 1001 on: " in last.reason


@pytest.mark.parametrize("name", ["in.arrow", "in.parquet"])
@pytest.mark.parametrize(
    "column",
    [
        pa.Array.from_buffers(
            pa.string(), 3, [None, pa.py_buffer(array("i", [0, 1, 2, 3]).tobytes()), pa.py_buffer(b"a\xffb")]
        ),
        pa.array([0, 2**31 - 1, 1], pa.int32()).view(pa.date32()),
        pa.array([0, 2**62, 1], pa.int64()).view(pa.timestamp("us")),
        pa.array([[0], [2**62], [1]], pa.list_(pa.duration("s"))),
        pa.array([None, 0, None], pa.timestamp("us", "Nowhere/Land")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_value_that_python_cannot_hold_is_a_fault_of_its_row(tmp_path: Path, name: str, column: Any):
    table = pa.table({"id": [1, 2, 3], "a": column})
    (pq.write_table if name == "in.parquet" else feather.write_feather)(table, str(tmp_path / name))
    with open_source(str(tmp_path / name), None) as source:
        rows = list(source.rows)
    assert [(row.number, row.values and row.values["id"]) for row in rows] == [(1, 1), (2, None), (3, 3)]
    assert rows[1].reason.startswith("column 'a' has a ")
    assert " that cannot be read: " in rows[1].reason


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow", "out.jsonl", "out.csv"])
def test_columns_of_any_arrow_type_are_written(tmp_path: Path, name: str):
    columns = {
        "words": pa.array(["x", "y"]).dictionary_encode(),
        "lists": pa.array([["x"], ["y"]], pa.list_(CODED)),
        "coded map": pa.array([[("k", "x")], []], pa.map_(CODED, CODED)),
        "coded pairs": pa.array([["x", "y"], ["y", "x"]], pa.list_(CODED, 2)),
        "coded view": pa.array([["x", "y"], []], pa.list_view(CODED)),
        "runs": pa.RunEndEncodedArray.from_arrays([2], [7]),
        "bytes": pa.array([b"\xff", b"a"]),
        "time": pa.array([1, 2], pa.timestamp("ns", "UTC")),
        "decimal": pa.array([1, 2], pa.decimal128(5, 2)),
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8())),
    }
    with pa.ipc.new_file(
        str(tmp_path / "in.arrow"), pa.schema([(name, each.type) for name, each in columns.items()])
    ) as f:
        f.write_batch(pa.record_batch(columns))
    with open_source(str(tmp_path / "in.arrow"), None) as source:
        rows = list(source.rows)
        output = JournaledOutput(tmp_path / name, make_sink(name, None, source, ("b",)), COMMAND, overwrite=False)
        output.write([Done(row, {"b": 0.5}) for row in rows])
        output.finish()
        output.close()
    assert not output.errors_path.exists()
    if name == "out.jsonl":
        first = json.loads((tmp_path / name).read_text().splitlines()[0])
        assert (first["words"], first["runs"], first["bytes"], first["time"]) == (
            "x",
            7,
            "/w==",
            "1970-01-01T00:00:00.000000001+00:00",
        )
    elif name != "out.csv":
        found = (
            pq.read_table(tmp_path / name)
            if name == "out.parquet"
            else pa.ipc.open_file(str(tmp_path / name)).read_all()
        )
        assert found.to_pylist() == [row.values | {"b": 0.5} for row in rows]


def test_the_first_rows_decide_the_columns(tmp_path: Path):
    rows = [Done(Row(1, 1, 1, {"a": 1}), {"b": 1}), Done(Row(2, 2, 2, {"a": "x", "c": 2}), {"b": 1})]
    output = JournaledOutput(tmp_path / "out.parquet", ArrowSink(None, (), is_parquet=True), COMMAND, overwrite=False)
    output.write([*rows, Done(Row(3, 3, 3, {"a": 3, "c": 4}), {"b": 1})])
    output.finish()
    output.close()
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert found == [{"a": 1, "b": 1, "c": None}, {"a": 3, "b": 1, "c": 4}]
    assert '"row":2' in output.errors_path.read_text()


def test_a_row_with_another_column_does_not_fit_into_a_csv(tmp_path: Path):
    out = tmp_path / "out.csv"
    output = opened(out)
    other = Done(Row(2, 2, 20, {"c": 1}), {"b": [1, None, True]})
    output.write([done(1)])
    output.write([other, Done(Row(3, 3, 30, {"a": True}), {"b": [1, None, "x"]})])
    output.finish()
    output.close()
    assert out.read_text() == 'a,b\n1,-1\ntrue,"[1,null,""x""]"\n'
    assert "column 'c' is in none of the first rows" in output.errors_path.read_text()
