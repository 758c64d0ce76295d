"""A column of float32 values: one packed byte string in msgpack, one list of numbers in JSON."""

import sys
from array import array
from collections.abc import Iterable
from math import isnan, nan
from typing import Self


class Floats(array):  # type: ignore[type-arg]
    """A column of float32 values. Logprobs are natural logarithms. A missing value is NaN here and null in JSON.

    In msgpack a column is `bin`, little-endian float32 (`numpy.frombuffer(column, "<f4")`).
    In JSON it is a list of numbers or nulls, and each number is the exact value of the float32.
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[float | None] = ()) -> Self:
        filled = [nan if value is None else value for value in values]
        return super().__new__(cls, "f", filled)  # type: ignore[return-value]

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
