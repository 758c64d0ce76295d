"""Control messages that load, serve and unload adapters between two steps.

StageAdapter ──► loaded and tested ──ServeAdapter──► new sequences can name it ──UnloadAdapter──► gone, once the
                                                                                sequences that have it are done
"""

from dataclasses import dataclass

from scorepool.engine.adapter import Adapter
from scorepool.engine.core import EngineCore
from scorepool.engine.errors import AdapterError, describe


@dataclass(frozen=True, slots=True)
class StageAdapter:
    """Load an adapter and test it, beside those that are served. The result describes it. Needs the weights."""

    name: str
    folder: str

    def apply(self, core: EngineCore) -> Adapter:
        """Load it. Raises AdapterError; then nothing has changed."""
        try:
            adapter = core.runner.load_adapter(self.name, self.folder, core.max_adapter_bytes)
        except AdapterError as error:
            raise AdapterError(f"adapter {self.name!r} cannot be loaded: {error.message}") from error
        except Exception as error:  # any: of mlx, or of the architecture
            raise AdapterError(f"adapter {self.name!r} cannot be loaded: {describe(error)}") from error
        core.adapters.stage(adapter)
        core.drop_unused_adapters()
        return adapter


@dataclass(frozen=True, slots=True)
class UnstageAdapter:
    """Give up a staged adapter."""

    name: str

    def apply(self, core: EngineCore) -> None:
        """Drop it. One that is not staged is ignored."""
        core.adapters.unstage(self.name)
        core.drop_unused_adapters()


@dataclass(frozen=True, slots=True)
class ServeAdapter:
    """Serve the staged adapter of a name, in place of one that is served under it."""

    name: str

    def apply(self, core: EngineCore) -> Adapter:
        """Serve it. Raises AdapterError if there is none."""
        adapter = core.adapters.serve(self.name)
        core.drop_unused_adapters()
        if adapter is None:
            raise AdapterError(f"adapter {self.name!r} is not loaded")
        return adapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Serve an adapter no more. Sequences that have it are computed to their end."""

    name: str

    def apply(self, core: EngineCore) -> Adapter | None:
        """Return the adapter; None if none of the name was served."""
        adapter = core.adapters.withdraw(self.name)
        core.drop_unused_adapters()
        return adapter


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter and serve it, in place of one that is served under its name. Needs the weights."""

    name: str
    folder: str

    def apply(self, core: EngineCore) -> Adapter:
        """Load and serve it. Raises AdapterError; then nothing has changed."""
        StageAdapter(self.name, self.folder).apply(core)
        return ServeAdapter(self.name).apply(core)
