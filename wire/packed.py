"""Hold the columns of all sequences of a result together, as bytes, and take them apart again."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from sys import byteorder
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import fields, replace

from scorepool.wire.columns import Floats

NO_TOKEN = -1  # in `top_ids`, where a row has fewer tokens
NO_RANK = 0
_INT_SIZE = 4

_Ints = Annotated[bytearray, Meta(description="Little-endian int32.")]
_Floats = Annotated[bytearray, Meta(description="Little-endian float32; NaN for a missing value.")]


class PackedColumns(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report the tokens of all sequences in one column each, sequence after sequence. Bytes are base64 in JSON.

    Numbers are little-endian, int32 or float32. The first `lengths[0]` rows of each column are of sequence 0. A value
    that is missing is NaN, a rank 0, and an id of `top_ids` -1.
    """

    lengths: Annotated[list[int], Meta(description="Reported tokens of each sequence.")]
    token_ids: _Ints
    logprobs: _Floats | None = None
    sampled_logprobs: _Floats | None = None
    ranks: _Ints | None = None
    entropies: _Floats | None = None
    num_top: Annotated[int, Meta(description="Ids in each row of `top_ids`.")] = 0
    top_ids: _Ints | None = None
    top_logprobs: _Floats | None = None
    num_targets: Annotated[int, Meta(description="Logprobs in each row of `target_logprobs`.")] = 0
    target_logprobs: _Floats | None = None

    def width(self, name: str) -> int:
        """Return how many numbers of a column belong to one token."""
        return {"top_ids": self.num_top, "top_logprobs": self.num_top, "target_logprobs": self.num_targets}.get(name, 1)

    def columns(self) -> Iterator[tuple[str, bytearray]]:
        """Yield the columns that there are, by name."""
        for name in COLUMN_NAMES:
            if (column := getattr(self, name)) is not None:
                yield name, column


COLUMN_NAMES = tuple(
    each.name for each in fields(PackedColumns) if each.name not in ("lengths", "num_top", "num_targets")
)
INT_COLUMNS = ("token_ids", "ranks", "top_ids")


def pack_ints(values: Iterable[int]) -> bytearray:
    """Return values as little-endian int32."""
    packed = array("i", values)
    if byteorder == "big":
        packed.byteswap()
    return bytearray(packed.tobytes())


def unpack_ints(packed: bytes | bytearray | memoryview) -> list[int]:
    """Return little-endian int32 values."""
    values = array("i")
    values.frombytes(packed)
    if byteorder == "big":
        values.byteswap()
    return values.tolist()


def join_packed(parts: Sequence[PackedColumns]) -> PackedColumns:
    """Return the columns of several results in their order. They have the same columns, or no tokens.

    Some may have no targets. Rows of targets are filled up to the longest.
    """
    num_targets = max(part.num_targets for part in parts)
    widened = [_with_targets(part, num_targets) for part in parts]
    names = dict.fromkeys(name for part in parts for name, _ in part.columns())
    return PackedColumns(
        lengths=[length for part in parts for length in part.lengths],
        num_top=max(part.num_top for part in parts),
        num_targets=num_targets,
        **{name: bytearray().join(getattr(part, name) or b"" for part in widened) for name in names},
    )


def _with_targets(part: PackedColumns, num_targets: int) -> PackedColumns:
    if part.num_targets == num_targets:
        return part
    missing = Floats([None] * (num_targets - part.num_targets)).pack()
    rows = _rows(part.target_logprobs or bytearray(), part.num_targets, sum(part.lengths))
    filled = bytearray().join(part for row in rows for part in (row, missing))
    return replace(part, num_targets=num_targets, target_logprobs=filled)


def _rows(column: bytearray, width: int, num_rows: int) -> Iterator[memoryview]:
    """Yield the bytes of each row."""
    whole, size = memoryview(column), width * _INT_SIZE
    return (whole[row * size : (row + 1) * size] for row in range(num_rows))


def unpacked_columns(packed: PackedColumns) -> Iterator[dict[str, Any]]:
    """Yield the columns of each sequence as fields of wire.SequenceResult. The tokens have no bytes."""
    for start, stop in pairwise(accumulate(packed.lengths, initial=0)):
        values: dict[str, Any] = {"token_bytes": [b""] * (stop - start)}
        for name, column in packed.columns():
            width = packed.width(name)
            size = width * _INT_SIZE
            part = memoryview(column)[start * size : stop * size]
            if name in ("token_ids", "ranks"):
                values[name] = unpack_ints(part)
            elif width == 1 and name in _VECTORS:
                values[name] = Floats.unpack(bytes(part))
            elif name == "top_ids":
                ids = (unpack_ints(row) for row in _rows(bytearray(part), width, stop - start))
                values[name] = [[each for each in row if each != NO_TOKEN] for row in ids]
            else:
                rows = (Floats.unpack(bytes(row)) for row in _rows(bytearray(part), width, stop - start))
                values[name] = [Floats(each for each in row if each == each) for row in rows]
        if "ranks" in values:
            values["ranks"] = [None if rank == NO_RANK else rank for rank in values["ranks"]]
        yield values


_VECTORS = ("logprobs", "sampled_logprobs", "entropies")
