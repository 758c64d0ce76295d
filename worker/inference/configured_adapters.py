"""Load the adapters of a worker's model that the settings name."""

from collections.abc import Iterable, Sequence

from scorepool.engine import AdapterError, Engine
from scorepool.store import Settings, SettingsError, parse_adapters
from scorepool.worker.rq.errors import StartError


def configured_adapters(settings: Settings, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return name and folder of the adapters of the model with these names. Raises SettingsError."""
    adapters = tuple((spec.name, spec.folder) for spec in parse_adapters(settings.adapters) if is_of(spec.model, names))
    for name, _ in adapters:
        check_free(name, names)
    return adapters


def check_models_of_adapters(settings: Settings, models: Sequence[Sequence[str]]) -> None:
    """Refuse an adapter of which several models, or none, could be meant. Raises SettingsError."""
    known = [name for names in models for name in names]
    for spec in parse_adapters(settings.adapters):
        if spec.model is None and len(models) > 1:
            raise SettingsError(
                f"SCOREPOOL_ADAPTERS: {spec.name}={spec.folder}: this worker serves several models; expected "
                f"{spec.name}@MODEL=FOLDER with one of {', '.join(known)}"
            )
        if len(models) > 1 and spec.name in known:
            raise SettingsError(f"adapter {spec.name!r}: the name is taken by a model; choose another")


def load_adapters(engine: Engine, adapters: Iterable[tuple[str, str]]) -> None:
    """Load adapters by name and folder. Raises StartError."""
    for name, folder in adapters:
        try:
            engine.load_adapter(name, folder).result()
        except AdapterError as error:
            raise StartError(error.message) from None


def is_of(model: str | None, names: Sequence[str]) -> bool:
    return model is None or model in names


def check_free(name: str, names: Sequence[str]) -> None:
    """Refuse the name of an adapter that is one of its model's. Raises SettingsError."""
    if name in names:
        raise SettingsError(f"adapter {name!r}: the name is taken by the model {names[0]!r}; choose another")
