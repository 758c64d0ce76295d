"""From a folder or a hub id to a tested model. Imported on the engine's thread; first of all it loads the BLAS.

Code that a checkpoint brings along is never run.
"""

# ruff: noqa: E402 - the BLAS must be there before mlx is
from engine import blas

_BLAS = blas.load()

import hashlib
import logging
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model, load_tokenizer

from engine.batch import Batch, Merged, Single
from engine.config import read_config
from engine.errors import LoadError
from engine.facts import Facts
from engine.runner import ModelRunner
from engine.selftest import find_fault, reference_logprobs, trial_rows
from engine.settings import EngineSettings
from engine.tap import Halves, split_model
from engine.tokenizer import Tokenizer

log = logging.getLogger("engine")

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
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_UNSTATED_CONTEXT_LENGTH = 32_768  # of recurrent models, which have no limit of their own


def open_model(settings: EngineSettings) -> ModelRunner:
    """Load, cast, split and test. Raises LoadError."""
    folder = _find(settings.model)
    model, config = _load(folder)
    _cast(model, settings.dtype)
    tokenizer = _load_tokenizer(folder, config)
    halves = split_model(model)
    vocab_size = int(model(mx.array([[0]])).shape[-1])
    batch, self_test = _choose_batch(model, halves, vocab_size)
    facts = Facts(
        fingerprint=fingerprint(folder),
        dtype=_dtype(model),
        quantization=_quantization(config),
        adapter=None,
        mode="default" if isinstance(batch, Merged) else "one row at a time",
        backend=_backend(),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        context_length=_context_length(config),
        vocab_size=vocab_size,
        self_test=self_test,
    )
    log.info("serving %s: %s", settings.model, facts)
    return ModelRunner(batch, halves, facts, tokenizer)


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
        model, config = load_model(folder, model_config=read_config(folder), trust_remote_code=False)
    except (ValueError, FileNotFoundError, KeyError, TypeError) as error:
        raise LoadError(f"mlx-lm cannot load {folder}: {type(error).__name__}: {error}") from error
    return model, config


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    try:
        wrapper = load_tokenizer(  # type: ignore[no-untyped-call]
            folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
        )
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise LoadError(f"the tokenizer of {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    return Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids)


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


def _choose_batch(model: Any, halves: Halves, vocab_size: int) -> tuple[Batch, str]:
    """The fastest way to run rows that passes its self-test, and what that said. Raises LoadError if none."""
    rows = trial_rows(vocab_size)
    reference = reference_logprobs(model, rows)
    if not all(mx.isfinite(mx.logsumexp(logprobs)).item() for logprobs in reference):
        raise LoadError("the model's logits are not finite on a few test tokens; another dtype may help")
    fault = find_fault(Merged(model, halves), halves, reference, rows)
    if fault is None:
        return Merged(model, halves), "passed"
    log.warning("the batched path of %s failed its self-test: %s", type(model).__module__, fault)
    single_fault = find_fault(Single(model, halves), halves, reference, rows)
    if single_fault is None:
        return Single(model, halves), f"served one row at a time: {fault}"
    raise LoadError(f"the model failed its self-test: batched, {fault}; one row at a time, {single_fault}")


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


def _context_length(config: dict[str, Any]) -> int:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_LENGTH_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return _UNSTATED_CONTEXT_LENGTH
