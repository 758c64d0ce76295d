"""The ranks that `mlx.launch` started together, and what rank 0 tells the others.

All that is sent is a sum over the ranks, because mlx has no other way that every backend offers: the others add zeros.
"""

import json
import os
from collections.abc import Mapping

import mlx.core as mx

from scorepool.engine.errors import LoadError

FIRST_BYTES = 4096  # of a message, with its size; most need no second sum
SIZE_BYTES = 4


class RankGroup:
    """The processes that hold one model. Must be used on the thread that uses the model.

    Every rank must make the same calls in the same order, or all of them wait for ever.
    """

    def __init__(self, num_ranks: int) -> None:
        """Join the others. Raises LoadError if they are not as many."""
        if "MLX_RANK" not in os.environ:
            raise LoadError(f"ranks is {num_ranks}, and this process has no rank: start it with `mlx.launch`")
        try:
            self.group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise LoadError(f"ranks is {num_ranks}, and the others cannot be reached: {error}") from error
        self.rank, self.size = self.group.rank(), self.group.size()
        if self.size != num_ranks:
            raise LoadError(f"ranks is {num_ranks}, and mlx.launch started {self.size}: expected the same number")

    def send(self, data: bytes) -> None:
        """Send a message from rank 0 to the others, which `receive` it."""
        begun = len(data).to_bytes(SIZE_BYTES, "big") + data[: FIRST_BYTES - SIZE_BYTES]
        self._sum(begun, FIRST_BYTES)
        if rest := data[FIRST_BYTES - SIZE_BYTES :]:
            self._sum(rest, len(rest))

    def receive(self) -> bytes:
        """Wait for a message of rank 0. Raises RuntimeError if a rank has gone."""
        begun = self._sum(b"", FIRST_BYTES)
        size = int.from_bytes(begun[:SIZE_BYTES], "big")
        num_missing = size - (FIRST_BYTES - SIZE_BYTES)
        if num_missing <= 0:
            return begun[SIZE_BYTES : SIZE_BYTES + size]
        return begun[SIZE_BYTES:] + self._sum(b"", num_missing)

    def agree(self, identity: Mapping[str, str]) -> None:
        """Compare what decides about the numbers over all ranks. Raises LoadError that names what differs."""
        first, *others = [json.loads(text) for text in self._gather(json.dumps(identity).encode())]
        for rank, other in enumerate(others, 1):
            for name in sorted(first.keys() | other.keys()):
                one, differing = first.get(name, "absent"), other.get(name, "absent")
                if one != differing:
                    raise LoadError(f"the ranks disagree: {name} is {one} on rank 0 and {differing} on rank {rank}")

    def smallest(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        return min(map(int, self._gather(str(value).encode())))

    def all_agree(self, answer: bool) -> bool:
        """True if the answer of every rank is true."""
        return bool(self.smallest(int(answer)))

    def _gather(self, data: bytes) -> list[bytes]:
        """Return what each rank has given, in the order of the ranks."""
        sizes = self._all(mx.array([len(data)], dtype=mx.int32))
        padded = data.ljust(max(row[0] for row in sizes))
        rows = self._all(mx.array(list(padded), dtype=mx.uint8))
        return [bytes(row[: size[0]]) for row, size in zip(rows, sizes, strict=True)]

    def _all(self, own: mx.array) -> list[list[int]]:
        gathered = mx.distributed.all_gather(own, group=self.group, stream=mx.cpu)
        return gathered.reshape(self.size, -1).tolist()  # type: ignore[return-value]

    def _sum(self, data: bytes, size: int) -> bytes:
        padded = mx.array(list(data.ljust(size, b"\0")), dtype=mx.uint8)
        total = mx.distributed.all_sum(padded, group=self.group, stream=mx.cpu)
        mx.eval(total)
        return bytes(total.tolist())  # type: ignore[arg-type]
