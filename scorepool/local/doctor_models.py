"""Check the models and adapters that the settings of a worker name, for `scorepool doctor`. Loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scorepool import store

CACHES_DIVISOR = 4  # several models fit together if this part of the memory is left for caches
ADAPTER_FILES = ("adapter_model.safetensors", "adapters.safetensors")


class Named(NamedTuple):
    """A model that the settings name."""

    names: list[str]  # its own, then its aliases
    source: str  # folder or hub id


def named_models(settings: store.Settings) -> list[Named]:
    """Return the models of the settings; check that their adapters belong to them. Raises SettingsError."""
    variable = "SCOREPOOL_MODELS" if settings.models else "SCOREPOOL_MODEL"
    models = [Named(names, source) for names, source in store.parse_models(settings.model_specs, variable)]
    if models:
        _check_adapters(settings, [name for model in models for name in model.names], is_one=len(models) == 1)
    return models


def describe_fit(
    settings: store.Settings, models: Sequence[Named], sizes: Sequence[Mapping[str, Any]], memory_bytes: int
) -> str:
    """Say what the weights take of the memory. `sizes` have `num_bytes`, or `error`. Raises SettingsError."""
    known: dict[str, int] = {}
    for model, size in zip(models, sizes, strict=True):
        name = model.names[0]
        if error := size.get("error"):
            raise store.SettingsError(f"model {name!r}: {error}")
        if (num_bytes := size["num_bytes"]) is None:
            continue
        if num_bytes >= memory_bytes:
            raise store.SettingsError(
                f"model {name!r}: its weights take {_mib(num_bytes)}, expected less than the {_mib(memory_bytes)} that "
                "models may use: quantise it, or raise SCOREPOOL_MEMORY_BYTES if the machine has more"
            )
        known[name] = num_bytes
    shown = [
        f"{model.names[0]} {_mib(known[model.names[0]]) if model.names[0] in known else '(hub id, not looked at)'}"
        for model in models
    ]
    total = sum(known.values())
    text = f"weights of {', '.join(shown)}"
    if len(models) == 1:
        return f"{text}, of {_mib(memory_bytes)}"
    if total + memory_bytes // CACHES_DIVISOR <= memory_bytes:
        return f"{text}: together {_mib(total)}, so one worker holds all in {_mib(memory_bytes)}"
    return (
        f"{text}: together {_mib(total)}, so of {_mib(memory_bytes)} one worker holds some at a time, by turns of "
        f"{settings.model_turn_s:g} s"
    )


def _check_adapters(settings: store.Settings, names: Sequence[str], *, is_one: bool) -> None:
    for spec in store.parse_adapters(settings.adapters):
        shown = f"SCOREPOOL_ADAPTERS: {spec.name}={spec.folder}"
        if spec.model is None and not is_one:
            expected = f"{spec.name}@MODEL={spec.folder} with one of {', '.join(names)}"
            raise store.SettingsError(f"{shown}: several models are served; expected {expected}")
        if spec.model is not None and spec.model not in names:
            raise store.SettingsError(f"{shown}: there is no model {spec.model!r}, expected one of {', '.join(names)}")
        if spec.name in names:
            raise store.SettingsError(f"{shown}: the name {spec.name!r} is taken by a model; choose another")
        folder = Path(spec.folder).expanduser()
        if not (folder / "adapter_config.json").is_file() or not any(
            (folder / file).is_file() for file in ADAPTER_FILES
        ):
            raise store.SettingsError(
                f"{shown}: expected a folder with adapter_config.json and {' or '.join(ADAPTER_FILES)}"
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 10 * 2**30 else f"{num_bytes / 2**30:,.1f} GiB"
