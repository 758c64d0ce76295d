"""Which rows begin alike, and where it pays to compute their beginning once. No tensors, no clock.

A radix tree over the tokens that rows begin with, up to the one that predicts the first token reported:

    rows                     tree
    q u e s t i o n 1 a                       ┌─ 1 ─┬─ a
    q u e s t i o n 1 b      q u e s t i o n ─┤     └─ b
    q u e s t i o n 2 c                       └─ 2 ─── c

A beginning is computed once two rows have had it: together, or one after the other, so that a prompt seen
once costs no memory. It is kept, least recently used out first, within `max_bytes`. Nothing is ever rolled
back: a row goes on from the whole of a computed beginning or from none of it, for recurrent caches and
sliding windows have no way back.
"""

from typing import Any

from scorepool.engine.sequence import Sequence

LEAST_TOKENS = 16  # a shorter beginning is not worth a forward of its own
LEAST_SAVED_TOKENS = 64  # over all rows that were seen to have it
REMEMBERED_TOKENS = 1_000_000  # of the tree; what is beyond is forgotten, oldest first


class Prefix:
    """The tokens from the root to here, which `num_rows` rows began with."""

    __slots__ = (
        "cache",
        "children",
        "edge",
        "is_computed",
        "last",
        "length",
        "num_bytes",
        "num_rows",
        "num_waiting",
        "parent",
    )

    def __init__(self, parent: "Prefix | None", edge: list[int]) -> None:
        self.parent = parent
        self.edge = edge  # tokens between the parent and here
        self.length: int = len(edge) + (parent.length if parent else 0)
        self.children: dict[int, Prefix] = {}  # by the first token of the edge
        self.num_rows = 0
        self.num_waiting = 0  # of them, not yet in a step
        self.is_computed = False  # or will be, in the step that is planned, before it is needed
        # The batch's own, set when the computation is launched: what rows go on from, its size, and the hidden
        # state of the last token, which predicts what follows.
        self.cache: Any = None
        self.num_bytes = 0
        self.last: Any = None

    @property
    def token_ids(self) -> list[int]:
        edges = [prefix.edge for prefix in self.path]
        return [token_id for edge in edges for token_id in edge]

    @property
    def path(self) -> list["Prefix"]:
        """From below the root down to here."""
        found: list[Prefix] = []
        prefix: Prefix | None = self
        while prefix is not None and prefix.parent is not None:
            found.append(prefix)
            prefix = prefix.parent
        return found[::-1]


class PrefixCache:
    def __init__(self, max_bytes: int, remembered_tokens: int = REMEMBERED_TOKENS) -> None:
        self.max_bytes = max_bytes
        self._remembered_tokens = remembered_tokens
        self._num_tokens = 0
        self._root = Prefix(None, [])
        self._of_waiting: dict[Sequence, Prefix] = {}  # the whole of what a row may share
        self._ends: dict[Prefix, None] = {}  # where some row's shareable tokens end; least recently used first
        self._computed: dict[Prefix, None] = {}  # least recently used first

    @property
    def num_bytes(self) -> int:
        return sum(prefix.num_bytes for prefix in self._computed)

    def add(self, sequence: Sequence) -> None:
        """A row waits."""
        token_ids = sequence.token_ids[: sequence.first_predictor + 1]
        if len(token_ids) < LEAST_TOKENS:
            return
        end = self._add_path(token_ids)
        for prefix in end.path:
            prefix.num_rows += 1
            prefix.num_waiting += 1
        self._of_waiting[sequence] = end
        self._ends.pop(end, None)
        self._ends[end] = None
        self._forget_oldest()

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer. One that is not here is passed over."""
        end = self._of_waiting.pop(sequence, None)
        for prefix in end.path if end else ():
            prefix.num_waiting -= 1

    def match(self, sequence: Sequence) -> tuple[Prefix | None, list[Prefix]]:
        """The computed prefix that a waiting row can go on from, and those worth computing after it, in order."""
        end = self._of_waiting.get(sequence)
        if end is None:
            return None, []
        path = end.path
        base = next((prefix for prefix in reversed(path) if prefix.is_computed), None)
        if base is not None:
            self._computed.pop(base, None)
            self._computed[base] = None
        missing: list[Prefix] = []
        start = base.length if base else 0
        for prefix, below in zip(path, [*path[1:], None], strict=True):
            is_shared_by_more = below is None or prefix.num_rows > below.num_rows
            length = prefix.length - start
            if is_shared_by_more and length >= LEAST_TOKENS and (prefix.num_rows - 1) * length >= LEAST_SAVED_TOKENS:
                missing.append(prefix)
                start = prefix.length
        return base, missing

    def insert(self, prefix: Prefix) -> None:
        """The step that is planned computes it."""
        prefix.is_computed = True
        self._computed[prefix] = None

    def evict(self) -> None:
        """Drop caches beyond `max_bytes`, but for those that waiting rows are to go on from."""
        excess = self.num_bytes - self.max_bytes
        for prefix in list(self._computed):
            if excess <= 0:
                break
            if not prefix.num_waiting:
                del self._computed[prefix]
                excess -= prefix.num_bytes
                prefix.is_computed, prefix.cache, prefix.last, prefix.num_bytes = False, None, None, 0

    def _add_path(self, token_ids: list[int]) -> Prefix:
        prefix, at = self._root, 0
        while at < len(token_ids):
            child = prefix.children.get(token_ids[at])
            if child is None:
                child = prefix.children[token_ids[at]] = Prefix(prefix, token_ids[at:])
                self._num_tokens += len(child.edge)
            common = _num_common(child.edge, token_ids, at)
            prefix = child if common == len(child.edge) else _split(child, common)
            at += common
        return prefix

    def _forget_oldest(self) -> None:
        while self._num_tokens > self._remembered_tokens and len(self._ends) > 1:
            oldest = next(iter(self._ends))
            del self._ends[oldest]
            num_rows = oldest.num_rows
            prefix = oldest
            while prefix.parent is not None and not prefix.children and prefix not in self._ends:
                self._num_tokens -= len(prefix.edge)
                del prefix.parent.children[prefix.edge[0]]
                num_rows = prefix.num_rows
                prefix = prefix.parent
            if prefix is not oldest:
                for above in prefix.path:
                    above.num_rows -= num_rows


def _split(child: Prefix, at: int) -> Prefix:
    """A new prefix in the middle of the edge to `child`, `at` tokens from its parent."""
    parent = child.parent
    if parent is None:
        raise ValueError("the root has no edge")
    middle = Prefix(parent, child.edge[:at])
    middle.num_rows, middle.num_waiting = child.num_rows, child.num_waiting
    parent.children[middle.edge[0]] = middle
    child.parent, child.edge = middle, child.edge[at:]
    middle.children[child.edge[0]] = child
    return middle


def _num_common(edge: list[int], token_ids: list[int], start: int) -> int:
    """How many tokens of the edge are those of the row from `start` on. In slices: Python compares them quickly."""
    low, high = 0, min(len(edge), len(token_ids) - start)
    if edge[:high] == token_ids[start : start + high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if edge[low:middle] == token_ids[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
