"""The adapters by name, and those that were unloaded and that sequences in flight still use. Knows no tensors."""

from collections.abc import Iterable

from scorepool.engine.adapter import Adapter
from scorepool.engine.errors import UnknownAdapter
from scorepool.engine.sequence import Sequence


class AdapterTable:
    """Which adapter a name stands for now. A sequence keeps the adapter that its name stood for when it came."""

    def __init__(self) -> None:
        self._served: dict[str, Adapter] = {}
        self._staged: dict[str, Adapter] = {}  # loaded and tested, and not served yet
        self._retired: list[Adapter] = []  # served no more; sequences in flight may use them

    @property
    def served(self) -> list[Adapter]:
        """The adapters that new sequences can name, in the order in which they were first served."""
        return list(self._served.values())

    @property
    def is_empty(self) -> bool:
        """True if no adapter is loaded."""
        return not (self._served or self._staged or self._retired)

    def assign(self, sequences: Iterable[Sequence]) -> None:
        """Give each sequence the adapter that it names; one that begins anew keeps its own. Raises UnknownAdapter."""
        for sequence in sequences:
            if sequence.adapter_name is None or sequence.adapter in self._retired:
                continue
            if (adapter := self._served.get(sequence.adapter_name)) is None:
                loaded = ", ".join(self._served) or "none"
                raise UnknownAdapter(
                    f"adapter {sequence.adapter_name!r} is not loaded, expected one of those that are: {loaded}"
                )
            sequence.adapter = adapter

    def stage(self, adapter: Adapter) -> None:
        """Keep a loaded adapter until it is served, in place of one of the same name that was staged before."""
        self.unstage(adapter.name)
        self._staged[adapter.name] = adapter

    def unstage(self, name: str) -> None:
        """Give up a staged adapter. None of the name is ignored."""
        if staged := self._staged.pop(name, None):
            self._retired.append(staged)

    def serve(self, name: str) -> Adapter | None:
        """Serve the staged adapter of the name from now on; return what the name stands for."""
        if staged := self._staged.pop(name, None):
            self.withdraw(name)
            self._served[name] = staged
        return self._served.get(name)

    def withdraw(self, name: str) -> Adapter | None:
        """Serve the adapter no more, and return it. Sequences that have it go on."""
        adapter = self._served.pop(name, None)
        if adapter is not None:
            self._retired.append(adapter)
        return adapter

    def take_unused(self, used: Iterable[Sequence]) -> list[Adapter]:
        """Forget and return the retired adapters that none of these sequences has."""
        if not self._retired:
            return []
        in_use = {sequence.adapter for sequence in used}
        unused = [adapter for adapter in self._retired if adapter not in in_use]
        self._retired = [adapter for adapter in self._retired if adapter in in_use]
        return unused
