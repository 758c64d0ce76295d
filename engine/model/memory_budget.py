"""Compute how many tokens' keys and values fit into memory beside the weights."""

import ctypes
import os
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from scorepool.engine.cache_room import CacheSizes
from scorepool.engine.errors import LoadError
from scorepool.engine.model import kv_cache
from scorepool.engine.settings import EngineSettings

CACHE_LIMIT_BYTES = 2**29  # buffers that mlx keeps for reuse


def cache_sizes(*models: Any) -> CacheSizes:
    """Return what the KV caches of models take together."""
    costs: list[tuple[int, int]] = []
    for model in models:
        cache = kv_cache.new(model)
        model(mx.array([[0]]), cache=cache)  # lazy: shapes are enough
        costs.append(kv_cache.cost(cache))
    return CacheSizes(*(sum(values) for values in zip(*costs, strict=True)))


def memory_bytes(settings: EngineSettings) -> int:
    """Return the memory that weights and caches may take."""
    return settings.memory_bytes or _available_bytes() * 4 // 5


def max_cached_tokens(weights: int, settings: EngineSettings, sizes: CacheSizes) -> int:
    """Return how many tokens' keys and values fit beside the bytes of weights; raise LoadError if none do."""
    memory = memory_bytes(settings)
    spare = memory - weights - settings.prefix_cache_bytes
    tokens = sizes.max_tokens(spare, settings.max_running_rows)
    if not tokens:
        raise LoadError(
            f"no memory is left for KV caches: of {memory} bytes the weights take {weights}, the prefix cache "
            f"{settings.prefix_cache_bytes}, and {settings.max_running_rows} running sequences and a prompt beside "
            f"them {sizes.bytes_per_row} each; lower prefix_cache_bytes or max_running_rows, or set memory_bytes"
        )
    return tokens


def refuse_second_copy(num_bytes: int) -> None:
    """Raise LoadError if weights of this size do not fit into the machine's memory beside what is in use."""
    memory, held = _available_bytes() * 4 // 5, mx.get_active_memory()
    if held + num_bytes > memory:
        raise LoadError(
            f"there is no memory for a second copy of the weights: of {memory} bytes {held} are in use, and the new "
            f"weights take {num_bytes}; lower prefix_cache_bytes, max_running_rows or memory_bytes"
        )


def weights_bytes(*models: Any) -> int:
    """Return the memory that the weights of models take."""
    arrays: list[tuple[str, mx.array]] = tree_flatten([model.parameters() for model in models])  # type: ignore[assignment]
    return sum({id(array): array.nbytes for _, array in arrays}.values())  # models may share some


def return_free_memory() -> None:
    """Give what MLX and the C library keep for reuse back to the system."""
    mx.clear_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # the GNU C library's: see host_memory.py
        trim(0)


def _available_bytes() -> int:
    """Return the memory that weights and caches may use: a GPU's own or its share, else all of the machine's."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        return int(info.get("max_recommended_working_set_size") or info["total_memory"])  # of Metal, of CUDA
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
