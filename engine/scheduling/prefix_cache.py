"""Find prefixes that sequences share, and decide which are worth computing once. Knows no tensors, no clock.

A radix tree over the tokens that sequences begin with, up to the one that predicts the first reported token:

    sequences                tree
    q u e s t i o n 1 a                       ┌─ 1 ─┬─ a
    q u e s t i o n 1 b      q u e s t i o n ─┤     └─ b
    q u e s t i o n 2 c                       └─ 2 ─── c

A prefix is computed once two sequences have begun with it, together or one after the other, so that a prompt seen
once costs no memory. Computed prefixes are kept within `max_bytes`; the least recently used is evicted first. No cache
is ever rolled back, because recurrent caches and sliding windows cannot be: a sequence continues from the end of a
computed prefix, or computes all of it. Each adapter has a tree of its own, because its caches are others, and so has
each scope, whose prompts must not be recognised by the time that they take. So have the images that a sequence shows,
which stand behind equal tokens.

A store keeps computed prefixes of the base model beyond that: a prefix that it holds is loaded instead of computed, in
the step in which a sequence begins with it. It gets one when the engine has nothing else to do, and those that are
evicted.
"""

from typing import Any, Protocol

from scorepool.engine.adapter import Adapter
from scorepool.engine.scheduling.prefix_stats import PrefixCounts, PrefixStats, TierStats
from scorepool.engine.sequence import Sequence

Key = tuple[Adapter | None, str | None, tuple[str, ...]]  # adapter, None being the base model; scope; images
MIN_TOKENS = 16  # a shorter prefix is not worth a forward pass of its own
MIN_SAVED_TOKENS = 64  # over all sequences that were seen to begin with the prefix
MIN_STORED_TOKENS = 256  # a shorter prefix is computed sooner than it is read
MAX_TREE_TOKENS = 1_000_000  # in the tree; beyond it the oldest paths are removed


class Prefix:
    """A node of the tree: the tokens from the root to here, with which `num_sequences` sequences began."""

    __slots__ = (
        "__weakref__",
        "cache",
        "children",
        "edge",
        "is_computed",
        "is_stored",
        "last_hidden",
        "length",
        "num_bytes",
        "num_sequences",
        "num_waiting",
        "parent",
    )

    def __init__(self, parent: "Prefix | None", edge: list[int]) -> None:
        self.parent = parent
        self.edge = edge  # tokens between the parent and here
        self.length: int = len(edge) + (parent.length if parent else 0)
        self.children: dict[int, Prefix] = {}  # by the first token of the edge
        self.num_sequences = 0
        self.num_waiting = 0  # of these sequences, not yet in a step
        self.is_computed = False  # True from the moment that its last slice is scheduled
        self.is_stored = False  # the store has it
        # Set by the batch when the computation is launched: the KV cache that sequences continue from, its size, and
        # the hidden state of the last token, which predicts what follows.
        self.cache: Any = None
        self.num_bytes = 0
        self.last_hidden: Any = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens from the root to here."""
        edges = [prefix.edge for prefix in self.path]
        return [token_id for edge in edges for token_id in edge]

    @property
    def path(self) -> list["Prefix"]:
        """The nodes from below the root down to this one."""
        found: list[Prefix] = []
        prefix: Prefix | None = self
        while prefix is not None and prefix.parent is not None:
            found.append(prefix)
            prefix = prefix.parent
        return found[::-1]


class Store(Protocol):
    """Keeps computed prefixes outside of memory: see model/prefix_store.py."""

    def longest(self, token_ids: list[int]) -> int:
        """Return the length of the longest beginning of these tokens that can be loaded; 0 if there is none."""

    def load(self, prefix: Prefix) -> bool:
        """Give a prefix its cache, size and last hidden state. Return False if they are not there any more."""

    def save(self, prefix: Prefix) -> bool:
        """Keep what a computed prefix holds. Return False if it has too much to do for that now."""

    @property
    def num_bytes(self) -> int:
        """The size of all that it keeps, about."""

    @property
    def num_evicted(self) -> int:
        """How many prefixes it has dropped to make room."""


class PrefixCache:
    """The tree, the sequences that wait, and the prefixes that are computed."""

    def __init__(
        self,
        max_bytes: int,
        max_tree_tokens: int = MAX_TREE_TOKENS,
        store: Store | None = None,
        counts: PrefixCounts | None = None,
    ) -> None:
        """Start with an empty tree."""
        self._counts = counts or PrefixCounts()
        self._loaded: set[Sequence] = set()  # waiting sequences for which the store was read
        self.max_bytes = max_bytes
        self.store = store
        self._max_tree_tokens = max_tree_tokens
        self._num_tokens = 0
        self._base = Prefix(None, [])  # of the base model, and of no scope
        self._roots: dict[Key, Prefix] = {(None, None, ()): self._base}
        self._keys: dict[Prefix, Key] = {self._base: (None, None, ())}  # of the roots
        self._waiting: dict[Sequence, Prefix] = {}  # all tokens that the sequence may share
        # The nodes where the shareable tokens of some sequence end, least recently used first.
        self._ends: dict[Prefix, None] = {}
        self._computed: dict[Prefix, None] = {}  # least recently used first

    @property
    def num_bytes(self) -> int:
        """The size of all computed prefixes."""
        return sum(prefix.num_bytes for prefix in self._computed)

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence to the tree."""
        token_ids = sequence.token_ids[: sequence.first_predictor + 1]
        if len(token_ids) < MIN_TOKENS:
            return
        digests = tuple(image.digest for image in sequence.images)
        root = self._root_for((sequence.adapter, sequence.prefix_scope, digests))
        if self.store and root is self._base and (length := self.store.longest(token_ids)):
            self._add_path(root, token_ids[:length]).is_stored = True
        end = self._add_path(root, token_ids)
        for prefix in end.path:
            prefix.num_sequences += 1
            prefix.num_waiting += 1
        self._waiting[sequence] = end
        self._ends.pop(end, None)
        self._ends[end] = None
        self._remove_oldest_paths()

    def count(self, sequence: Sequence) -> None:
        """Count whether a sequence that begins has found a prefix. One that can share nothing is ignored."""
        if sequence in self._waiting:
            is_loaded = sequence in self._loaded
            is_found = sequence.num_cached > 0 or is_loaded
            self._counts.count(has_store=self.store is not None, is_found=is_found, is_loaded=is_loaded)

    @property
    def stats(self) -> PrefixStats:
        """What was counted since the engine's start, and the sizes now."""
        counts, store = self._counts, self.store
        memory = TierStats(counts.memory_hits, counts.memory_misses, counts.memory_evictions, self.num_bytes)
        if store is None:
            return PrefixStats(memory)
        return PrefixStats(memory, TierStats(counts.disk_hits, counts.disk_misses, store.num_evicted, store.num_bytes))

    def remove(self, sequence: Sequence) -> None:
        """Stop counting a sequence as waiting. One that is not here is ignored."""
        self._loaded.discard(sequence)
        end = self._waiting.pop(sequence, None)
        for prefix in end.path if end else ():
            prefix.num_waiting -= 1

    def num_to_load(self, sequence: Sequence) -> int:
        """Count the tokens of the prefix that `load` would read for a waiting sequence; 0 if there is none."""
        stored = self._longest_stored(sequence)
        return stored.length if stored else 0

    def load(self, sequence: Sequence) -> None:
        """Load the longest prefix that the store has of a waiting sequence, unless a longer one is in memory."""
        while stored := self._longest_stored(sequence):
            stored.is_stored = self.store is not None and self.store.load(stored)
            if stored.is_stored:
                self.insert(stored)
                self._loaded.add(sequence)

    def match(self, sequence: Sequence) -> tuple[Prefix | None, list[Prefix]]:
        """Return the computed prefix that a waiting sequence can continue from, and those worth computing after it."""
        end = self._waiting.get(sequence)
        if end is None:
            return None, []
        path = end.path
        cached = next((prefix for prefix in reversed(path) if prefix.is_computed), None)
        if cached is not None:
            self._computed.pop(cached, None)
            self._computed[cached] = None
        missing: list[Prefix] = []
        start = cached.length if cached else 0
        for prefix, child in zip(path, [*path[1:], None], strict=True):
            is_shared_by_more = child is None or prefix.num_sequences > child.num_sequences
            length = prefix.length - start
            if is_shared_by_more and length >= MIN_TOKENS and (prefix.num_sequences - 1) * length >= MIN_SAVED_TOKENS:
                missing.append(prefix)
                start = prefix.length
        return cached, missing

    def insert(self, prefix: Prefix) -> None:
        """Make a prefix available: the step that is being scheduled completes it."""
        prefix.is_computed = True
        self._computed[prefix] = None

    def evict(self) -> None:
        """Drop caches beyond `max_bytes`, except those that waiting sequences will continue from."""
        excess = self.num_bytes - self.max_bytes
        for prefix in list(self._computed):
            if excess <= 0:
                break
            if not prefix.num_waiting:
                self._save(prefix)
                excess -= self._drop(prefix)
                self._counts.memory_evictions += 1

    def store_one(self) -> None:
        """Give the store the last used prefix that it has not. Not between `schedule` and the launch of its step."""
        for prefix in reversed(self._computed):
            if self._save(prefix):
                return

    def clear(self) -> int:
        """Drop every cache and return the number of bytes freed. Not between `schedule` and the launch of its step."""
        return sum(self._drop(prefix) for prefix in list(self._computed))

    def forget_adapter(self, adapter: Adapter) -> None:
        """Drop the trees of an adapter that no sequence has."""
        for key in [key for key in self._roots if key[0] is adapter]:
            self._forget(self._roots.pop(key))

    def _root_for(self, key: Key) -> Prefix:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Prefix(None, [])
            self._keys[root] = key
        return root

    def _forget(self, root: Prefix) -> None:
        del self._keys[root]
        for prefix in [prefix for prefix in self._computed if _root_of(prefix) is root]:
            self._drop(prefix)
        for end in [end for end in self._ends if _root_of(end) is root]:
            del self._ends[end]
        self._num_tokens -= _num_tokens_below(root)

    def _longest_stored(self, sequence: Sequence) -> Prefix | None:
        """Find the longest prefix of a waiting sequence that the store has; None if a longer one is in memory."""
        end = self._waiting.get(sequence)
        if end is None or self.store is None:
            return None
        longest = next((prefix for prefix in reversed(end.path) if prefix.is_computed or prefix.is_stored), None)
        return None if longest is None or longest.is_computed else longest

    def _save(self, prefix: Prefix) -> bool:
        """Give a computed prefix to the store. Return False if it has it, or needs none."""
        is_worth_it = prefix.length >= MIN_STORED_TOKENS and prefix.num_bytes > 0
        if self.store is None or prefix.is_stored or not is_worth_it or _root_of(prefix) is not self._base:
            return False
        prefix.is_stored = self.store.save(prefix)
        return prefix.is_stored

    def _drop(self, prefix: Prefix) -> int:
        num_bytes: int = prefix.num_bytes
        del self._computed[prefix]
        prefix.is_computed, prefix.cache, prefix.last_hidden, prefix.num_bytes = False, None, None, 0
        return num_bytes

    def _add_path(self, root: Prefix, token_ids: list[int]) -> Prefix:
        prefix, at = root, 0
        while at < len(token_ids):
            child = prefix.children.get(token_ids[at])
            if child is None:
                child = prefix.children[token_ids[at]] = Prefix(prefix, token_ids[at:])
                self._num_tokens += len(child.edge)
            common = _num_common(child.edge, token_ids, at)
            prefix = child if common == len(child.edge) else _split(child, common)
            at += common
        return prefix

    def _remove_oldest_paths(self) -> None:
        while self._num_tokens > self._max_tree_tokens and len(self._ends) > 1:
            oldest = next(iter(self._ends))
            del self._ends[oldest]
            num_sequences = oldest.num_sequences
            prefix = oldest
            while prefix.parent is not None and not prefix.children and prefix not in self._ends:
                self._num_tokens -= len(prefix.edge)
                del prefix.parent.children[prefix.edge[0]]
                num_sequences = prefix.num_sequences
                prefix = prefix.parent
            if prefix is not oldest:
                for above in prefix.path:
                    above.num_sequences -= num_sequences
            if not prefix.children and prefix is not self._base and (key := self._keys.pop(prefix, None)):
                del self._roots[key]


def _root_of(prefix: Prefix) -> Prefix:
    while prefix.parent is not None:
        prefix = prefix.parent
    return prefix


def _num_tokens_below(root: Prefix) -> int:
    total, nodes = 0, [root]
    while nodes:
        node = nodes.pop()
        total += len(node.edge)
        nodes += node.children.values()
    return total


def _split(child: Prefix, at: int) -> Prefix:
    """Insert a node in the middle of the edge to `child`, `at` tokens below its parent."""
    parent = child.parent
    if parent is None:
        raise ValueError("the root has no edge")
    middle = Prefix(parent, child.edge[:at])
    middle.num_sequences, middle.num_waiting = child.num_sequences, child.num_waiting
    parent.children[middle.edge[0]] = middle
    child.parent, child.edge = middle, child.edge[at:]
    middle.children[child.edge[0]] = child
    return middle


def _num_common(edge: list[int], token_ids: list[int], start: int) -> int:
    """Count the leading tokens of the edge that equal `token_ids` from `start` on. Compares slices, which is fast."""
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
