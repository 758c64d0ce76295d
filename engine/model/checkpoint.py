"""Find a checkpoint, load it with mlx-lm, and correct mlx-lm's known mistakes. Never run code from a checkpoint."""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from scorepool.engine.errors import LoadError, as_load_error, describe
from scorepool.engine.local_folder import WEIGHTS, find_local_folder
from scorepool.engine.model import activations, classifier, idefics3, mends, mtp_layouts, packed_weights, rope
from scorepool.engine.model.config import Config, read_config, refuse_ignored_settings
from scorepool.engine.model.contradictions import refuse_more_layers_than_tensors
from scorepool.engine.model.mends.experts import ROUTER_BIAS
from scorepool.engine.model.ranks.group import RankGroup
from scorepool.engine.model.ranks.sharding import shard
from scorepool.engine.model.weight_checks import refuse_degenerate_weights
from scorepool.engine.text.chat.call_formats import formats
from scorepool.engine.text.chat.chat_format import HARMONY, ChatTags
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer

POOLING_SETTINGS = "1_Pooling/config.json"  # of sentence-transformers: no token's logprob depends on it
_CONTENT = (  # the files that the numbers depend on, and that are fetched from the hub
    WEIGHTS,
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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.jinja",
)
_INDEX = "model.safetensors.index.json"  # which transformers needs to certify the model
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embed_in.weight", "wte.weight")
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_DEFAULT_CONTEXT_LENGTH = 32_768  # for recurrent models, which have no limit of their own


def find_folder(model: str) -> Path:
    """Return the model's folder, or download the hub's snapshot."""
    if folder := find_local_folder(model):
        return folder
    try:
        return Path(snapshot_download(model, allow_patterns=[*_CONTENT, POOLING_SETTINGS, _INDEX]))
    except Exception as error:  # any: HTTP, DNS, disk, authorisation; huggingface_hub has no common class
        raise LoadError(
            f"there is no folder {model!r}, and the hub id cannot be downloaded: {describe(error)}"
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


def load_weights(folder: Path, dtype: str, ranks: RankGroup | None = None) -> tuple[Any, Config]:
    """Load the model in `dtype`, with mlx-lm's known mistakes corrected, and its configuration.

    Of several `ranks` each reads its share of the layers only.
    """
    config = read_config(folder)
    activations.check(config)
    rope.check_types(config)
    with as_load_error(f"mlx-lm cannot load {folder}"):
        stored = stored_tensors(folder)
        refuse_more_layers_than_tensors(config, len(stored))
        has_lm_head = not classifier.is_classifier(config)
        if not has_lm_head:
            config["tie_word_embeddings"] = True
        model, config = _load_model(dtype)(
            folder,
            lazy=ranks is not None,
            model_config=config,
            get_model_classes=_get_checked_classes if has_lm_head else _get_body_classes,
            trust_remote_code=False,
        )
        if ranks is not None:
            shard(model, config, ranks)
        _cast(model, dtype)
        mx.eval(model.parameters())
    refuse_degenerate_weights(model)
    mends.apply(model, config, stored)
    if has_lm_head:
        _refuse_dropped_head(stored, model)
    return model, config


def load_as(folder: Path, config: Config, dtype: str, get_classes: Callable[[Config], tuple[Any, Any]]) -> Any:
    """Load the checkpoint's tensors, as far as they are used, as a model of other classes and settings."""
    model, _ = _load_model(dtype)(
        folder, lazy=True, model_config=config, get_model_classes=get_classes, trust_remote_code=False
    )
    _cast(model, dtype)
    return model


def _load_model(dtype: str) -> Callable[..., tuple[Any, Config]]:
    """Return mlx-lm's load_model, reading the weights that AutoAWQ and AutoGPTQ packed as `packed_weights` does."""
    unpack = partial(packed_weights.unpack, dtype=_target_dtype(dtype))
    load = FunctionType(load_model.__code__, {**load_model.__globals__, "_transform_awq_weights": unpack})
    load.__defaults__ = load_model.__defaults__
    return load


def load_chat_codec(
    folder: Path,
    config: Config,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    tool_repair: bool = False,
) -> ChatCodec:
    """Load the tokenizer, with the parsers of these names. Raises LoadError, also for one that does not fit it."""
    for chosen, name, known in (
        ("tool_parser", tool_parser, formats.TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, formats.REASONING_PARSERS),
    ):
        if name not in known:
            raise LoadError(f"{chosen} is {name!r}, expected one of {', '.join(known)}")
    with as_load_error(f"the tokenizer of {folder} cannot be loaded"):
        wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    tokenizer, found = Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids), ChatTags.from_mlx_lm(wrapper)
    tags = _with_reasoning_parser(found, reasoning_parser, wrapper.get_vocab())
    return ChatCodec(tokenizer, _with_tool_parser(tags, tool_parser, wrapper.get_vocab()), tool_repair)


def _with_tool_parser(tags: ChatTags, name: str, vocabulary: Mapping[str, int]) -> ChatTags:
    if name == "auto" or name in formats.HARMONY_NAMES:
        return _checked_headers(tags, f"tool_parser {name}", vocabulary, name in formats.HARMONY_NAMES)
    if name == "none":
        chosen = replace(tags, call=None, tool_parser=None, call_format=None)
    else:
        canonical = formats.ALIASES.get(name, name)
        found = formats.FORMATS[canonical]
        parser = None if found.parse else import_module(f"mlx_lm.tool_parsers.{found.mlx_lm}").parse_tool_call
        chosen = tags.with_call_format(canonical, parser)
    return _checked(chosen, f"tool_parser {name}", vocabulary)


def _with_reasoning_parser(tags: ChatTags, name: str, vocabulary: Mapping[str, int]) -> ChatTags:
    if name == "auto" or name in formats.HARMONY_REASONING_NAMES:
        writes_headers = name in formats.HARMONY_REASONING_NAMES
        return _checked_headers(tags, f"reasoning_parser {name}", vocabulary, writes_headers)
    think = None if name == "none" else formats.REASONING_TAGS[name]
    return _checked(replace(tags, think=think), f"reasoning_parser {name}", vocabulary)


def _checked_headers(tags: ChatTags, chosen: str, vocabulary: Mapping[str, int], writes_headers: bool) -> ChatTags:
    """Return the tags. Raises LoadError if the model should write messages with headers, and does not."""
    missing = next((token for token in HARMONY if token not in vocabulary), None)
    if writes_headers and missing is not None:
        raise LoadError(f"{chosen} does not fit this model: the tokenizer has no token {missing!r}")
    return tags


def _checked(tags: ChatTags, chosen: str, vocabulary: Mapping[str, int]) -> ChatTags:
    try:
        tags.check_fit(vocabulary)
    except ValueError as error:
        raise LoadError(f"{chosen} does not fit this model: {error}") from None
    return tags


def weights_dtype(model: Any) -> str:
    """Name the dtype of most of the floating-point weights."""
    return str(main_dtype(model)).removeprefix("mlx.core.")


def main_dtype(model: Any) -> mx.Dtype:
    """Return the dtype of most of the floating-point weights."""
    num_bytes: Counter[mx.Dtype] = Counter()
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for _, weight in weights:
        if mx.issubdtype(weight.dtype, mx.floating):
            num_bytes[weight.dtype] += weight.nbytes
    return num_bytes.most_common(1)[0][0]


def quantization(model: Any, config: Config) -> str | None:
    """Describe the quantisation of most of the quantised weights, e.g. "4-bit affine, groups of 64"."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not settings:
        return None
    num_weights: Counter[str] = Counter()
    for module in model.modules():
        if "scales" in module and hasattr(module, "bits"):
            mode = getattr(module, "mode", "affine")  # some architectures bring a layer of their own
            described = f"{module.bits}-bit {mode}, groups of {module.group_size}"
            num_weights[described] += module.weight.size * 32 // module.bits
    if not num_weights:  # the weights were dequantised
        return str(settings.get("quant_method", "unknown"))
    return num_weights.most_common(1)[0][0]


def configured_context_length(config: Config) -> int:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_LENGTH_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return _DEFAULT_CONTEXT_LENGTH


def import_architecture(config: Config) -> tuple[Any, Any]:
    """Return the classes for the model and its arguments, of mlx-lm or in its form. Raises LoadError."""
    if config["model_type"] in idefics3.MODEL_TYPES:
        return idefics3.Model, idefics3.ModelArgs
    what = f"mlx-lm has no {config['model_type']!r}"
    with redirect_stdout(StringIO()) as printed, as_load_error(what):
        try:
            model_class, args_class = _get_classes(config)
        except SystemExit as error:  # olmo prints what it needs
            raise LoadError(f"{what}: {printed.getvalue().strip()}") from error
    return model_class, args_class


def _get_checked_classes(config: Config) -> tuple[Any, Any]:
    """Return mlx-lm's classes for the model and its arguments; refuse settings that the arguments do not have."""
    model_class, args_class = import_architecture(config)
    refuse_ignored_settings(config, set(inspect.signature(args_class).parameters))
    return mtp_layouts.without_heads(model_class, config), args_class


def _get_body_classes(config: Config) -> tuple[Any, Any]:
    """Return the classes for the body of a classifier."""
    model_class, args_class = _get_checked_classes(config)
    return classifier.body_class(model_class), args_class


def stored_tensors(folder: Path) -> dict[str, mx.array]:
    """Return the tensors of the checkpoint by name. They are lazy: only the files' headers are read."""
    stored: dict[str, mx.array] = {}
    for file in sorted(folder.glob(WEIGHTS)):
        stored |= mx.load(str(file))  # type: ignore[arg-type]
    return stored


def _refuse_dropped_head(stored: dict[str, mx.array], model: Any) -> None:
    """Refuse a head beside embeddings that the configuration ties it to: transformers uses it if the two differ."""
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    names = [name for name, _ in weights]
    head = next((weight for name, weight in stored.items() if name.endswith(_HEAD)), None)
    embeddings = next((weight for name, weight in stored.items() if name.endswith(_EMBEDDINGS)), None)
    if head is None or embeddings is None or any(name.endswith(_HEAD) for name in names):
        return
    if head.shape != embeddings.shape or bool((head != embeddings).any().item()):
        raise LoadError(
            f"config.json: tie_word_embeddings is true, but the checkpoint has a {_HEAD} that differs from the "
            "embeddings, expected false: mlx-lm drops the head, and its logprobs would be wrong"
        )


def _target_dtype(dtype: str) -> mx.Dtype | None:
    """Return the dtype to compute in; None for the checkpoint's."""
    if dtype == "auto" and mx.default_device() == mx.gpu:
        return None
    target: mx.Dtype = getattr(mx, "float32" if dtype == "auto" else dtype)
    return target


def _cast(model: Any, dtype: str) -> None:
    """Cast floating-point weights to `dtype`. Packed weights stay; their scales are cast."""
    target = _target_dtype(dtype)
    if target is None:
        return
    # Some weights lose too much in 16 bits: Mamba's A_log, a router's bias. dots1 does not name its bias as others do.
    named = getattr(model, "cast_predicate", lambda path: True)

    def may_narrow(path: str) -> bool:
        return not path.endswith(ROUTER_BIAS) and bool(named(path))

    def cast(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating) or not (target == mx.float32 or may_narrow(path)):
            return weight
        return weight.astype(target)

    model.update(tree_map_with_path(cast, model.parameters()))
