"""From a folder or a hub id to a tested model. Imported on the engine's thread; first of all it loads the BLAS.

Code that a checkpoint brings along is never run.
"""

# ruff: noqa: E402 - the BLAS must be there before mlx is
from scorepool.engine.model import blas

_BLAS = blas.load()

import hashlib
import inspect
import logging
import os
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from scorepool.engine.errors import LoadError
from scorepool.engine.model import activations
from scorepool.engine.model import kv_cache as caches
from scorepool.engine.model import rope as positions
from scorepool.engine.model.backbone import BackboneAndHead, split_model
from scorepool.engine.model.batch import BatchInvariant, BatchRunner, PaddedBatch, SequentialBatch
from scorepool.engine.model.config import read_config, refuse_overlooked
from scorepool.engine.model.patch_globals import patch_globals
from scorepool.engine.model.runner import ModelRunner
from scorepool.engine.model.selftest import SHARING, find_fault, reference_logprobs, trial_rows, window_row
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.chat_format import Tags
from scorepool.engine.text.chat.constraint import Constrainer
from scorepool.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_WEIGHTS = "model*.safetensors"
_CONTENT = (  # what the numbers depend on, and what is fetched from the hub
    _WEIGHTS,
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "*.jinja",
)
CACHE_LIMIT_BYTES = 2**29  # of buffers that mlx keeps for reuse
_ROUTER_BIAS = "e_score_correction_bias"  # which expert a token goes to depends on it
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_UNLIMITED_TOKENS = 2**31  # of a model whose cache does not grow
_UNSTATED_CONTEXT_LENGTH = 32_768  # of recurrent models, which have no limit of their own


def open_model(settings: EngineSettings) -> ModelRunner:
    """Load, cast, split and test. Raises LoadError."""
    folder = _find(settings.model)
    model, config = _load(folder)
    _cast(model, settings.dtype)
    if config["model_type"] in ("gemma3", "gemma3_text"):
        _scale_embeddings(model)
    limit = positions.settle(model, config)
    activations.settle(model, config)
    tokenizer = _load_tokenizer(folder, config)
    mx.set_cache_limit(CACHE_LIMIT_BYTES)
    halves = split_model(model)
    vocab_size = int(model(mx.array([[0]])).shape[-1])
    batch, self_test = _choose_batch(model, halves, vocab_size, settings.mode)
    model_info = ModelInfo(
        fingerprint=fingerprint(folder),
        dtype=_dtype(model),
        quantization=_quantization(config),
        adapter=None,
        mode=settings.mode if isinstance(batch, PaddedBatch | BatchInvariant) else "one row at a time",
        backend=_backend(),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        context_length=_context_length(config, limit),
        max_cached_tokens=_max_cached_tokens(model, settings),
        vocab_size=vocab_size,
        self_test=self_test,
    )
    log.info("serving %s: %s", settings.model, model_info)
    return ModelRunner(batch, halves, model_info, tokenizer)


def fingerprint(folder: Path) -> str:
    """sha256 over name and content of every file that the numbers depend on, wherever the folder lies."""
    names = sorted({path.name for pattern in _CONTENT for path in folder.glob(pattern)})
    whole = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()


def _find(model: str) -> Path:
    """The folder, or the hub's snapshot."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        for needed in ("config.json", _WEIGHTS):
            if not any(folder.glob(needed)):
                raise LoadError(f"{folder} has no {needed}; a model folder in Hugging Face form has one")
        return folder
    if folder.is_absolute() or model.startswith(("~", ".")) or model.count("/") != 1:
        raise LoadError(f"there is no folder {model!r}; give a model folder, or a hub id such as owner/name")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_CONTENT)))
    except Exception as error:  # any: HTTP, DNS, disk, authorisation; huggingface_hub has no common class
        raise LoadError(
            f"{model!r} is no folder here, and the hub did not give it: {type(error).__name__}: {error}"
        ) from error


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_model(
            folder, model_config=read_config(folder), get_model_classes=_classes, trust_remote_code=False
        )
    except (ValueError, FileNotFoundError, KeyError, TypeError) as error:
        raise LoadError(f"mlx-lm cannot load {folder}: {type(error).__name__}: {error}") from error
    _refuse_dropped_bias(folder, model)
    if config["model_type"] == "falcon_h1":
        _scale_keys(model)
    return model, config


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    model_class, args_class = _get_classes(config)
    refuse_overlooked(config, set(inspect.signature(args_class).parameters))
    return model_class, args_class


def _refuse_dropped_bias(folder: Path, model: Any) -> None:
    """mlx-lm drops weights that an architecture has no use for; of ernie4_5_moe it drops one that it should use."""
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    is_held = any(name.endswith(_ROUTER_BIAS) for name, _ in weights)
    if is_held:
        return
    stored: list[dict[str, mx.array]] = [mx.load(str(file)) for file in folder.glob(_WEIGHTS)]  # type: ignore[misc] # lazy
    biases = [weight for file in stored for name, weight in file.items() if name.endswith(_ROUTER_BIAS)]
    if any(bool((bias != 0).any().item()) for bias in biases):
        raise LoadError(f"{folder} has weights {_ROUTER_BIAS}, which mlx-lm drops: its logprobs would be wrong")


def _scale_keys(model: Any) -> None:
    """mlx-lm multiplies falcon_h1's weights by its multipliers, but keys by none: it looks for another name."""
    for layer in model.layers:
        layer.self_attn.scale *= model.args.key_multiplier


def _scale_embeddings(model: Any) -> None:
    """By the root of their width in the model's dtype. mlx-lm's gemma3 rounds it to bfloat16 in every dtype."""
    backbone = next(module for module in model.modules() if type(module).__name__ == "Gemma3Model")
    patch_globals(model, type(backbone), "mx", bfloat16=getattr(mx, _dtype(model)))


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise LoadError(f"the tokenizer of {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    return Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids, Tags.of(wrapper), Constrainer)


def _cast(model: Any, dtype: str) -> None:
    """Floating weights to `dtype`, evaluated. Packed weights stay as they are; their scales are cast."""
    if dtype == "auto" and mx.default_device() == mx.gpu:
        return
    target: mx.Dtype = getattr(mx, "float32" if dtype == "auto" else dtype)
    # Some weights lose too much in 16 bits (Mamba's A_log, a router's bias): the architecture says which.
    may_narrow = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating) or not (target == mx.float32 or may_narrow(path)):
            return weight
        return weight.astype(target)

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())


def _choose_batch(model: Any, halves: BackboneAndHead, vocab_size: int, mode: str) -> tuple[BatchRunner, str]:
    """The fastest way to run rows that passes its self-test, and what that said. Raises LoadError if none."""
    rows = trial_rows(vocab_size)
    reference, seconds = _timed(model, rows)
    if not all(mx.isfinite(mx.logsumexp(logprobs)).item() for logprobs in reference):
        raise LoadError("the model's logits are not finite on a few test tokens; another dtype may help")
    window = caches.smallest_window(caches.new(model))
    longest = window_row(window, vocab_size, seconds) if window else None
    if window and not longest:  # once more: what comes first is slower, and a machine may stand still for a moment
        longest = window_row(window, vocab_size, _timed(model, rows)[1])
    passed = f"passed; too slow to test beyond its window of {window} tokens" if window and not longest else "passed"
    faults: list[str] = []
    for kind in (BatchInvariant,) if mode == "exact" else (PaddedBatch, SequentialBatch):
        batch: BatchRunner = kind(model, halves)
        fault = find_fault(batch, halves, reference, rows, longest)
        if fault is not None and fault.startswith(SHARING):
            log.warning("prompts are not shared: %s", fault)
            batch = kind(model, halves, can_share=False)
            if find_fault(batch, halves, reference, rows, longest) is None:
                return batch, f"{passed}; every row computes its whole prompt: {fault}"
        if fault is None:
            return batch, f"served one row at a time: {faults[0]}" if faults else passed
        log.warning("%s of %s failed its self-test: %s", kind.__name__, type(model).__module__, fault)
        faults.append(fault)
    raise LoadError(f"the model failed its self-test: {'; one row at a time, '.join(faults)}")


def _timed(model: Any, rows: list[list[int]]) -> tuple[list[mx.array], float]:
    """The rows' reference logprobs, and how many seconds they took."""
    started = time.perf_counter()
    reference = reference_logprobs(model, rows)
    mx.eval(reference)
    return reference, time.perf_counter() - started


def _max_cached_tokens(model: Any, settings: EngineSettings) -> int:
    """How many tokens' keys and values fit beside the weights. Raises LoadError if none do."""
    cache = caches.new(model)
    mx.eval(model(mx.array([[0]]), cache=cache))
    bytes_per_token, bytes_per_row = caches.cost(cache)
    memory = settings.memory_bytes or _memory_bytes() * 4 // 5
    arrays: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    weights = sum(array.nbytes for _, array in arrays)
    spare = memory - weights - settings.prefix_cache_bytes - settings.max_running_rows * bytes_per_row
    if spare < bytes_per_token:
        raise LoadError(
            f"no memory is left for KV caches: of {memory} bytes the weights take {weights}, shared prompts "
            f"{settings.prefix_cache_bytes}, and {settings.max_running_rows} rows {bytes_per_row} each; "
            "lower prefix_cache_bytes or max_running_rows, or set memory_bytes"
        )
    return spare // bytes_per_token if bytes_per_token else _UNLIMITED_TOKENS


def _memory_bytes() -> int:
    """What weights and caches may take: the GPU's share of a Mac's memory, else the machine's."""
    if mx.default_device() == mx.gpu:
        return int(mx.device_info()["max_recommended_working_set_size"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _dtype(model: Any) -> str:
    """That of most floating weights."""
    num_bytes: Counter[str] = Counter()
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for _, weight in weights:
        if mx.issubdtype(weight.dtype, mx.floating):
            num_bytes[str(weight.dtype).removeprefix("mlx.core.")] += weight.nbytes
    return num_bytes.most_common(1)[0][0]


def _quantization(config: dict[str, Any]) -> str | None:
    found = config.get("quantization") or config.get("quantization_config")
    if not found:
        return None
    if "bits" not in found:
        return str(found.get("quant_method", "unknown"))
    return f"{found['bits']}-bit {found.get('mode', 'affine')}, groups of {found['group_size']}"


def _backend() -> str:
    if mx.default_device() == mx.cpu:
        return f"cpu ({_BLAS})"
    return "metal" if mx.metal.is_available() else "cuda"


def _context_length(config: dict[str, Any], limit: int | None) -> int:
    stated = _stated_context_length(config)
    if limit is None or limit >= stated:
        return stated
    log.warning(
        "context is %d of %d tokens: beyond it mlx-lm does not treat positions as the model does", limit, stated
    )
    return limit


def _stated_context_length(config: dict[str, Any]) -> int:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_LENGTH_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return _UNSTATED_CONTEXT_LENGTH
