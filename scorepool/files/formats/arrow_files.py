"""Read and write Parquet and Arrow files. Needs pyarrow, so registry.py imports it on first use.

Rows are kept as an Arrow stream until all are done: unlike a Parquet file it can be appended to, and cut off.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from scorepool import wire
from scorepool.files.errors import BadInput
from scorepool.files.rows import Row, Values

ROWS_PER_BATCH = 1024
ROWS_PER_GROUP = 65_536  # of a Parquet file that is written
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(file: BinaryIO, name: str) -> tuple[Iterator[Row], Any]:
    """Return the rows of a Parquet file, and its schema. Raises BadInput."""
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{name} is not a Parquet file, or it was cut: {_first_line(error)}") from None
    _check_columns(parquet.schema_arrow, name)
    scale = file.seek(0, os.SEEK_END) / max(1, parquet.metadata.num_rows)
    return _rows(parquet.iter_batches(ROWS_PER_BATCH), name, scale), parquet.schema_arrow


def read_arrow(file: BinaryIO, name: str) -> tuple[Iterator[Row], Any]:
    """Return the rows of an Arrow file, also called Feather, or of an Arrow stream, and its schema. Raises BadInput."""
    try:
        if not file.seekable() or file.read(6) != b"ARROW1":
            if file.seekable():
                file.seek(0)
            stream = pa.ipc.open_stream(file)
            schema, batches, scale = stream.schema, stream, 0.0
        else:
            reader = pa.ipc.open_file(file)
            schema = reader.schema
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            num_rows = _num_rows(reader)
            scale = file.seek(0, os.SEEK_END) / num_rows if num_rows else 0.0
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{name} is not an Arrow file, or it was cut: {_first_line(error)}") from None
    _check_columns(schema, name)
    return _rows(batches, name, scale), schema


def _num_rows(reader: Any) -> int:
    """Return how many rows an Arrow file has, 0 if that is not known because it is damaged."""
    try:
        return sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches))
    except (pa.ArrowException, OSError):
        return 0


def _check_columns(schema: Any, name: str) -> None:
    if doubled := [column for column, count in Counter(schema.names).items() if count > 1]:
        raise BadInput(f"{name} has several columns {doubled[0]!r}: expected different names")


def check_texts(schema: Any, columns: Iterable[str], name: str) -> None:
    """Raise BadInput for a column of a type that holds neither text nor lists."""
    for column in columns:
        found = _plain(schema.field(column).type)
        is_text = pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
        if not (is_text or pa.types.is_nested(found)):
            raise BadInput(f"column {column!r} of {name} is of type {found}: expected text or lists")


def _rows(batches: Iterable[Any], name: str, scale: float) -> Iterator[Row]:
    """Yield rows. `scale` is the file's bytes per row. Where the file is damaged, the last row says so."""
    number = 0
    try:
        for batch in batches:
            for part in range(0, batch.num_rows, ROWS_PER_BATCH):
                for values, reason in _convert(batch.slice(part, ROWS_PER_BATCH)):
                    number += 1
                    yield Row(number, number, int(number * scale), values, reason)
    except (pa.ArrowException, OSError) as error:
        reason = f"{name} cannot be read from row {number + 1} on: {_first_line(error)}"
        yield Row(number + 1, number + 1, int(number * scale), None, reason)


def _convert(batch: Any) -> Iterator[tuple[Values | None, str]]:
    """Yield the values of each row, or none and the reason if Python cannot hold one of them."""
    try:
        rows = batch.to_pylist()
    except Exception:  # of many kinds: text that is not UTF-8, a date of the year 10000, an unknown time zone
        for index in range(batch.num_rows):
            yield _convert_row(batch.slice(index, 1))
    else:
        yield from ((values, "") for values in rows)


def _convert_row(row: Any) -> tuple[Values | None, str]:
    values: Values = {}
    for field, column in zip(row.schema, row.columns, strict=True):
        try:
            [values[field.name]] = column.to_pylist()
        except Exception as error:
            return None, f"column {field.name!r} has a {field.type} that cannot be read: {_first_line(error)}"
    return values, ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class ArrowSink:
    """Record batches of one schema: the input's, and for other columns the types of the first rows.

    If these are null in all first rows, a new column holds numbers, and another one text.
    """

    def __init__(self, source_schema: Any, new_columns: Collection[str], *, is_parquet: bool) -> None:
        self._source_schema, self._new_columns = source_schema, new_columns
        self._is_parquet = is_parquet
        self._schema: Any = None

    @property
    def _inferred(self) -> list[str]:
        """The input's columns whose types the first rows decide, so that later ones may not fit."""
        known = self._source_schema.names if self._source_schema is not None else ()
        return [name for name in self._schema.names if name not in known and name not in self._new_columns]

    def restore(self, partial: Path) -> None:
        with pa.OSFile(str(partial)) as file:
            self._schema = pa.ipc.open_stream(file).schema

    def encode(self, rows: Sequence[Values]) -> tuple[bytes, dict[int, str]]:
        if not rows:
            return b"", {}
        head = b""
        if self._schema is None:
            self._schema = self._choose_schema(rows)
            head = self._schema.serialize().to_pybytes()
        encoded, reasons = [], {}
        try:
            encoded.append(self._encode_batch(rows))
        except ValueError:
            for index, row in enumerate(rows):
                try:
                    encoded.append(self._encode_batch([row]))
                except ValueError as error:
                    reasons[index] = f"the row does not fit the types of the first rows: {error}"
        return head + b"".join(encoded), reasons

    def _encode_batch(self, rows: Sequence[Values]) -> bytes:
        """Return the message of a record batch. Raises ValueError if a row does not fit the schema."""
        names = set(self._schema.names)
        for row in rows:
            if unknown := row.keys() - names:
                raise ValueError(f"column {min(unknown)!r} is in none of them")
        try:
            batch = pa.RecordBatch.from_pylist(rows, schema=self._schema)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(_first_line(error)) from None
        for name in self._inferred:  # pyarrow cuts 1.5 to an integer, and leaves out the keys that a type has not
            for written, row in zip(batch.column(name).to_pylist(), rows, strict=True):
                if not _is_same(written, row.get(name)):
                    raise ValueError(f"column {name!r} would become {wire.quote(written)}")
        return bytes(batch.serialize())

    def _choose_schema(self, rows: Sequence[Values]) -> Any:
        """Return the schema of all rows, from the first ones. Raises BadInput."""
        known = {} if self._source_schema is None else {field.name: field for field in self._source_schema}
        fields = []
        for name in dict.fromkeys(name for row in rows for name in row):
            if name in known:
                fields.append(known[name].with_type(_plain(known[name].type)))
            else:
                found = _common_type([row.get(name) for row in rows], name)
                null = pa.float64() if name in self._new_columns else pa.string()
                fields.append(pa.field(name, _map_type(found, partial(_unless_null, null))))
        for field in fields if self._is_parquet else ():
            _check_parquet(field)
        return pa.schema(fields)

    def end(self) -> bytes:
        return _END_OF_STREAM

    def make_file(self, partial: Path, out: Path) -> None:
        new = out.with_name(out.name + ".new")
        with pa.OSFile(str(partial)) as file:
            stream = pa.ipc.open_stream(file) if partial.stat().st_size else ()
            schema = stream.schema if stream else pa.schema([])
            make_writer = pq.ParquetWriter if self._is_parquet else pa.ipc.new_file
            try:
                with new.open("wb") as written:
                    with make_writer(written, schema) as writer:
                        for group in _groups(stream):
                            writer.write_table(pa.Table.from_batches(group))
                    written.flush()
                    os.fsync(written.fileno())
            except OSError:
                new.unlink(missing_ok=True)  # it may fill the disk
                raise
        os.replace(new, out)


def _is_same(written: Any, given: Any) -> bool:
    """True if a value is as it was given, but for keys that were added with null."""
    if isinstance(given, dict):
        return isinstance(written, dict) and all(_is_same(written.get(key), value) for key, value in given.items())
    if isinstance(given, list):
        return isinstance(written, list) and len(written) == len(given) and all(map(_is_same, written, given))
    return bool(written == given or (written != written and given != given))  # NaN


def _plain(data_type: Any) -> Any:
    """Return the type of the same values without a dictionary or runs, which record batches would have to share."""

    def value_type(leaf: Any) -> Any:
        is_coded = pa.types.is_dictionary(leaf) or pa.types.is_run_end_encoded(leaf)
        return _plain(leaf.value_type) if is_coded else leaf

    return _map_type(data_type, value_type)


def _map_type(data_type: Any, change: Callable[[Any], Any]) -> Any:
    """Return a type with other types in the place of its leaves, which are no lists, maps or structs."""

    def mapped(field: Any) -> Any:
        return field.with_type(_map_type(field.type, change))

    for is_of_kind, make in _LISTS:
        if is_of_kind(data_type):
            return make(mapped(data_type.value_field))
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(mapped(data_type.value_field), data_type.list_size)
    if pa.types.is_map(data_type):
        return pa.map_(mapped(data_type.key_field), mapped(data_type.item_field), data_type.keys_sorted)
    if pa.types.is_struct(data_type):
        return pa.struct(list(map(mapped, data_type)))
    return change(data_type)


_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def _unless_null(null: Any, data_type: Any) -> Any:
    """Return a type, or `null` in the place of that of values that are all null."""
    return null if pa.types.is_null(data_type) else data_type


def _common_type(values: Sequence[Any], name: str) -> Any:
    """Return the type of a column's values, or that of the first one which has a type if they have none in common.

    Raises BadInput if no value has one.
    """
    reason = ""
    for candidates in (values, *([value] for value in values if value is not None)):
        try:
            return pa.array(candidates).type
        except (pa.ArrowException, OverflowError) as error:
            reason = reason or _first_line(error)
    raise BadInput(f"column {name!r} does not fit into this format ({reason}): give OUT as .jsonl")


def _check_parquet(field: Any) -> None:
    """Raise BadInput for a column that Parquet cannot hold."""
    try:
        with pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])):
            pass
    except pa.ArrowException as error:
        reason = f"column {field.name!r} does not fit into Parquet ({_first_line(error)})"
        raise BadInput(f"{reason}: give OUT as .jsonl or .arrow") from None


def _groups(batches: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(each.num_rows for each in group) >= ROWS_PER_GROUP:
            yield group
            group = []
    if group:
        yield group
