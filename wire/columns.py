"""Define per-token columns: a column of float32 values, and the columns that a token delta and its result share."""

import sys
from array import array
from collections.abc import Iterable
from math import isnan, nan
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, Struct

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # of the model itself; of what tokens are sampled from


class Floats(array):  # type: ignore[type-arg]
    """Hold a column of float32 values. Logprobs are natural logarithms. A missing value is NaN here and null in JSON.

    In msgpack a column is `bin`, little-endian float32 (`numpy.frombuffer(column, "<f4")`).
    In JSON it is a list of numbers or nulls, and each number is the exact value of the float32.
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[float | None] = ()) -> Self:
        filled = [nan if value is None else value for value in values]
        return super().__new__(cls, "f", filled)  # type: ignore[return-value]

    @classmethod
    def of_finite(cls, values: Iterable[float]) -> Self:
        """Return a column of numbers, of which none is missing. A NaN would be one."""
        return super().__new__(cls, "f", values)  # type: ignore[return-value]

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Read little-endian float32 values; raise ValueError if the length is not a multiple of 4 bytes."""
        column = cls()
        column.frombytes(packed)
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def pack(self) -> bytes:
        """Return the values as little-endian float32."""
        if sys.byteorder == "little":
            return self.tobytes()
        swapped = array("f", self)
        swapped.byteswap()
        return swapped.tobytes()

    def values(self) -> list[float | None]:
        """Return the values, with None for a missing one."""
        return [None if isnan(value) else value for value in self]


class StreamedColumns(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the columns that a token delta and its result share. Every column has one entry per token."""

    token_ids: list[int]
    token_bytes: Annotated[list[bytes], Meta(description="The tokens' bytes in the vocabulary.")]
    logprobs: Floats | None = None
    top_ids: Annotated[
        list[list[int]] | None,
        Meta(description="Most likely first, ties by smaller id. Empty where there is no logprob."),
    ] = None
    top_bytes: list[list[bytes]] | None = None
    top_logprobs: list[Floats] | None = None
    target_logprobs: Annotated[
        list[Floats] | None,
        Meta(
            description="Logprobs of the request's `targets` at each token, in their order. Empty where there is none."
        ),
    ] = None

    def columns(self, start: int = 0, end: int | None = None) -> dict[str, Any]:
        """Copy the columns of tokens [start, end), by name."""
        return {name: _slice(getattr(self, name), start, end) for name in StreamedColumns.__struct_fields__}


def _slice(column: Any, start: int, end: int | None) -> Any:
    if column is None:
        return None
    return Floats(column[start:end]) if isinstance(column, Floats) else column[start:end]
