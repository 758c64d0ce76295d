"""Find the models that a worker serves: those of its settings whose queues it was given."""

from collections.abc import Iterable
from dataclasses import dataclass

from scorepool.store import Settings, SettingsError, parse_models, queue_names


@dataclass(frozen=True, slots=True)
class ConfiguredModel:
    """A model to serve."""

    names: list[str]  # its own name, then its aliases
    source: str  # a folder or hub id
    queues: list[str]  # of the worker, the first to be drained first


def configured_models(settings: Settings, queues: Iterable[str]) -> list[ConfiguredModel]:
    """Return the models, each with those of the worker's queues that are its own. Raises SettingsError."""
    variable = "SCOREPOOL_MODELS" if settings.models else "SCOREPOOL_MODEL"
    specs = settings.model_specs
    if not specs:
        raise SettingsError("SCOREPOOL_MODEL is not set; give NAME=FOLDER_OR_HUB_ID, the model to serve")
    parsed, queues = parse_models(specs, variable), list(queues)
    own = [queue for names, _ in parsed for queue in queue_names(*names)]
    for queue in queues:
        if queue not in own:
            raise SettingsError(
                f"queue {queue!r} is not one of those of {variable}={settings.models or settings.model}: "
                f"{', '.join(own)}"
            )
    found = [
        ConfiguredModel(names, source, [queue for queue in queues if queue in queue_names(*names)])
        for names, source in parsed
    ]
    for one in found:
        if not one.queues:
            raise SettingsError(
                f"{variable}: model {one.names[0]!r} is given none of its queues: add "
                f"{' '.join(queue_names(*one.names))} to the command, or leave the model out"
            )
    return found
