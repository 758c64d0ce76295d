"""Open several models in one process. They take turns on one MLX thread and share its memory.

Each model gets a share of the memory that its weights and caches never exceed. Where the shares of all do not fit
together, residency.py decides whose weights are loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from scorepool.engine.control import SetMemory
from scorepool.engine.engine import Engine, open_runner
from scorepool.engine.engine_loop import EngineLoop
from scorepool.engine.errors import LoadError
from scorepool.engine.residency import Residency
from scorepool.engine.runner import Runner
from scorepool.engine.settings import EngineSettings
from scorepool.engine.weights_size import weights_bytes

CACHES_DIVISOR = 4  # this part of the memory is kept for caches, if there is not more
UNKNOWN_BYTES = 2**62  # of a model of the hub: it is opened alone
PREFIX_CACHE_DIVISOR = 2  # at most this part of a model's caches is its prefix cache


def open_engines(
    settings: Mapping[str, EngineSettings],
    turn_s: float,
    open_runner: Callable[[EngineSettings], Runner] = open_runner,
) -> dict[str, Engine]:
    """Open the models by name, one after the other. `memory_bytes` of the first is that of all.

    Raises LoadError that names the model that cannot be served.
    """
    memory_bytes = next(iter(settings.values())).memory_bytes
    residency = Residency(memory_bytes, turn_s)
    loop = EngineLoop(residency)
    engines: dict[str, Engine] = {}
    try:
        for name, one in settings.items():
            try:
                engine = Engine(_for_opening(one), open_runner, loop, num_bytes=_estimate_bytes(one))
            except LoadError as error:
                raise LoadError(f"model {name!r}: {error.message}") from error
            engines[name] = engine
            residency.memory_bytes = residency.memory_bytes or engine.model_info.memory_bytes
            engine.resident.size_bytes = engine.model_info.weights_bytes
        _share_memory(engines, settings, residency.memory_bytes or 0)
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise
    return engines


def divide_memory(memory_bytes: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Return each model's share of the memory: its weights, and caches.

    If all fit together, what the weights leave is divided. Else a quarter of the memory is for the caches of as many
    models as fit at once, and a model whose weights leave less has what is left.
    """
    spare = memory_bytes - sum(weights.values())
    if spare >= memory_bytes // CACHES_DIVISOR:
        return {name: size + spare // len(weights) for name, size in weights.items()}
    caches = memory_bytes // CACHES_DIVISOR
    num_fitting, left = 0, memory_bytes - caches
    for size in sorted(weights.values()):
        left -= size
        num_fitting += left >= 0
    caches //= max(1, num_fitting)
    return {name: min(memory_bytes, size + caches) for name, size in weights.items()}


def _share_memory(engines: Mapping[str, Engine], settings: Mapping[str, EngineSettings], memory_bytes: int) -> None:
    """Give each model its share of the memory, and drop weights that do not fit. Raises LoadError."""
    shares = divide_memory(memory_bytes, {name: engine.model_info.weights_bytes for name, engine in engines.items()})
    for name, engine in engines.items():
        caches = shares[name] - engine.model_info.weights_bytes
        prefix_cache_bytes = min(settings[name].prefix_cache_bytes, max(0, caches) // PREFIX_CACHE_DIVISOR)
        engine.control(SetMemory(shares[name], prefix_cache_bytes)).result()
        engine.resident.size_bytes = shares[name]
        if not engine.model_info.max_cached_tokens:
            raise LoadError(
                f"model {name!r}: its share of the memory is {shares[name]} of {memory_bytes} bytes, of which the "
                f"weights take {engine.model_info.weights_bytes}: nothing is left for KV caches; raise memory_bytes, "
                "or lower max_running_rows or the number of models"
            )
    num_loaded = sum(shares[name] for name, engine in engines.items() if engine.is_loaded)
    for name, engine in engines.items():
        if num_loaded > memory_bytes and engine.is_loaded:
            engine.drop_weights().result()
            num_loaded -= shares[name]


def _for_opening(settings: EngineSettings) -> EngineSettings:
    """Return the settings for a model whose share of the memory is not known yet: all of it, nearly without caches."""
    if settings.memory_bytes is None:
        return settings
    return replace(settings, prefix_cache_bytes=min(settings.prefix_cache_bytes, settings.memory_bytes // 16))


def _estimate_bytes(settings: EngineSettings) -> int:
    """Return what the weights may take, before they are loaded."""
    try:
        sizes = [weights_bytes(source, settings.dtype) for source in (settings.model, settings.draft) if source]
    except LoadError:
        return 0  # opening it says why
    return sum(UNKNOWN_BYTES if size is None else size for size in sizes)
