"""Find a checkpoint, load it with mlx-lm, and correct mlx-lm's known mistakes. Never run code from a checkpoint."""

import hashlib
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from scorepool.engine.errors import LoadError
from scorepool.engine.model import mends
from scorepool.engine.model.config import Config, read_config, refuse_ignored_settings
from scorepool.engine.text.chat.chat_format import ChatTags
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer

_WEIGHTS = "model*.safetensors"
_CONTENT = (  # the files that the numbers depend on, and that are fetched from the hub
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
_ROUTER_BIAS = "e_score_correction_bias"  # decides which experts compute a token
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_DEFAULT_CONTEXT_LENGTH = 32_768  # for recurrent models, which have no limit of their own


def find_folder(model: str) -> Path:
    """Return the model's folder, or download the hub's snapshot."""
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
            f"there is no folder {model!r}, and the hub id cannot be downloaded: {type(error).__name__}: {error}"
        ) from error


def fingerprint(folder: Path) -> str:
    """Return the sha256 over name and content of every file that the numbers depend on, independent of the path."""
    names = sorted({path.name for pattern in _CONTENT for path in folder.glob(pattern)})
    total = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()


def load_weights(folder: Path, dtype: str) -> tuple[Any, Config]:
    """Load the model in `dtype`, with mlx-lm's known mistakes corrected, and its configuration."""
    try:
        model, config = load_model(
            folder, model_config=read_config(folder), get_model_classes=_get_checked_classes, trust_remote_code=False
        )
    except (ValueError, FileNotFoundError, KeyError, TypeError) as error:
        raise LoadError(f"mlx-lm cannot load {folder}: {type(error).__name__}: {error}") from error
    _refuse_dropped_bias(folder, model)
    _cast(model, dtype)
    mends.apply(model, config)
    return model, config


def load_chat_codec(folder: Path, config: Config) -> ChatCodec:
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise LoadError(f"the tokenizer of {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    return ChatCodec(Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids), ChatTags.from_mlx_lm(wrapper))


def weights_dtype(model: Any) -> str:
    """Return the dtype of most of the floating-point weights."""
    num_bytes: Counter[str] = Counter()
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for _, weight in weights:
        if mx.issubdtype(weight.dtype, mx.floating):
            num_bytes[str(weight.dtype).removeprefix("mlx.core.")] += weight.nbytes
    return num_bytes.most_common(1)[0][0]


def quantization(config: Config) -> str | None:
    """Describe the quantisation of the weights, e.g. "4-bit affine, groups of 64"."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not settings:
        return None
    if "bits" not in settings:
        return str(settings.get("quant_method", "unknown"))
    return f"{settings['bits']}-bit {settings.get('mode', 'affine')}, groups of {settings['group_size']}"


def configured_context_length(config: Config) -> int:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_LENGTH_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return _DEFAULT_CONTEXT_LENGTH


def _get_checked_classes(config: Config) -> tuple[Any, Any]:
    """Return mlx-lm's classes for the model and its arguments; refuse settings that the arguments do not have."""
    model_class, args_class = _get_classes(config)
    refuse_ignored_settings(config, set(inspect.signature(args_class).parameters))
    return model_class, args_class


def _refuse_dropped_bias(folder: Path, model: Any) -> None:
    """Refuse a router bias that mlx-lm drops: it ignores weights that an architecture has no use for (ernie4_5_moe)."""
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    if any(name.endswith(_ROUTER_BIAS) for name, _ in weights):
        return
    stored: list[dict[str, mx.array]] = [mx.load(str(file)) for file in folder.glob(_WEIGHTS)]  # type: ignore[misc] # lazy
    biases = [weight for file in stored for name, weight in file.items() if name.endswith(_ROUTER_BIAS)]
    if any(bool((bias != 0).any().item()) for bias in biases):
        raise LoadError(f"{folder} has weights {_ROUTER_BIAS}, which mlx-lm drops: its logprobs would be wrong")


def _cast(model: Any, dtype: str) -> None:
    """Cast floating-point weights to `dtype` and evaluate them. Packed weights stay; their scales are cast."""
    if dtype == "auto" and mx.default_device() == mx.gpu:
        return
    target: mx.Dtype = getattr(mx, "float32" if dtype == "auto" else dtype)
    # Some weights lose too much in 16 bits (Mamba's A_log, a router's bias); the architecture names them.
    may_narrow = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating) or not (target == mx.float32 or may_narrow(path)):
            return weight
        return weight.astype(target)

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())
