"""Open a model: load the checkpoint, check or patch it, test it, and describe it. Import on the MLX thread.

How MLX multiplies is prepared first, before anything imports it.
"""

# ruff: noqa: E402 - MLX must be prepared before it is imported
from scorepool.engine.model import products

_BLAS = products.prepare()

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine import certificate
from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.model import (
    activations,
    background,
    checkpoint,
    classifier,
    cpu_kernels,
    cpu_norms,
    cpu_products,
    cuda_rotary,
    memory_budget,
    mtp_weights,
    prefix_file,
    pushed_weights,
    rope,
    rope_positions,
    surveyed,
    windows,
)
from scorepool.engine.model.adapters.bank import AdapterBank
from scorepool.engine.model.adapters.host import AdapterHost
from scorepool.engine.model.backbone import BackboneAndHead, KnownTokens, split_model
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.batch_choice import choose_batch
from scorepool.engine.model.batch_invariant import TILE, BatchInvariant
from scorepool.engine.model.classifier_runner import ClassifierRunner
from scorepool.engine.model.config import Config, load_raw_config
from scorepool.engine.model.contradictions import refuse_contradictions, refuse_small_vocabulary
from scorepool.engine.model.device import gpu_kind, rounds_to_tf32
from scorepool.engine.model.draft import DraftModel
from scorepool.engine.model.images import TextModel, open_images
from scorepool.engine.model.mtp import PredictionHead
from scorepool.engine.model.padded_batch import PaddedBatch
from scorepool.engine.model.pooling import default_pooling
from scorepool.engine.model.prefix_store import PrefixStore
from scorepool.engine.model.prompt_scorer import PromptScorer
from scorepool.engine.model.ranks.follower import Follower
from scorepool.engine.model.ranks.group import RankGroup
from scorepool.engine.model.ranks.leader import LeadingBatch
from scorepool.engine.model.runner import ModelRunner
from scorepool.engine.model.sequential_batch import SequentialBatch
from scorepool.engine.model_info import ModelInfo, Verification
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer
from scorepool.engine.versions import image_versions, installed_version

log = logging.getLogger(__name__)


def open_model(settings: EngineSettings) -> ModelRunner | ClassifierRunner:
    """Load, check, split and self-test the model; raise LoadError if its numbers cannot be trusted."""
    with as_load_error(f"{settings.model} cannot be loaded"):
        folder = checkpoint.find_folder(settings.model)
        if settings.weights_folder is None:
            return _open_model(folder, settings)
        with pushed_weights.overlay(folder, settings) as (overlaid, dtype):
            return _open_model(overlaid, replace(settings, dtype=dtype))


def follow(settings: EngineSettings) -> None:
    """Load this rank's share of a model and run what rank 0 sends until it closes. Raises LoadError, RuntimeError."""
    runner = open_model(settings)
    assert isinstance(runner, ModelRunner)  # a classifier is refused
    Follower(runner.batch, RankGroup(settings.ranks)).run()


def _open_model(folder: Path, settings: EngineSettings) -> ModelRunner | ClassifierRunner:
    config, is_surveyed = _check_config(folder)
    classified = classifier.read_classifier(config) if classifier.is_classifier(config) else None
    if classified is not None and settings.ranks > 1:
        raise LoadError(f"ranks is {settings.ranks}, and the model is a classifier: expected 1")
    if classified is not None and settings.draft is not None:
        raise LoadError(
            f"draft is {settings.draft!r}, and the model is a classifier, which generates nothing: expected none"
        )
    chat = _load_chat_codec(folder, config, settings)
    ranks = RankGroup(settings.ranks) if settings.ranks > 1 else None
    fingerprint = None  # made once: it reads all weights
    if ranks is not None:
        fingerprint = checkpoint.fingerprint(folder)
        settings = _agree(ranks, fingerprint, settings)
    model, config, position_limit = load_checked(folder, settings.dtype, checks_settings=False, ranks=ranks)
    mx.set_cache_limit(memory_budget.CACHE_LIMIT_BYTES)
    tapped = split_model(model)
    adapted = AdapterBank(model, tapped)
    images = open_images(TextModel(folder, config, model, adapted, chat.tokenizer), settings)
    split = images.split or adapted
    chat.images, chat.images_unsupported = images.codec, images.unsupported
    head = None if classified is None else classifier.load_head(checkpoint.stored_tensors(folder), classified, tapped)
    vocab_size = count_logits(model)
    refuse_small_vocabulary(vocab_size, chat.tokenizer.token_ids)  # config.json may leave vocab_size out
    context_length = _context_length(config, position_limit)
    speculates = settings.speculation != "off"
    drafts = speculates and settings.draft is not None
    draft: DraftModel | PredictionHead | None
    draft_model, draft, scorer = _load_draft(settings, chat.tokenizer, vocab_size) if drafts else (None, None, None)
    if settings.speculation == "mtp" and classified is None:
        draft_model, mtp_head = mtp_weights.load_head(folder, config, settings.dtype, model)
        draft = PredictionHead(mtp_head)
    all_agree = bool if ranks is None else ranks.all_agree
    batch, self_test = choose_batch(model, split, vocab_size, settings.mode, context_length, speculates, all_agree)
    whole_prompts = _reason_for_whole_prompts(batch, scorer, model, split, vocab_size, context_length)
    models = [model] if draft_model is None else [model, draft_model]
    towers = [] if images.tower is None else [images.tower]
    cache_sizes, num_bytes = memory_budget.cache_sizes(*models), memory_budget.weights_bytes(*models, *towers)
    model_info = ModelInfo(
        fingerprint=fingerprint or checkpoint.fingerprint(folder),
        weights_version=settings.weights_version,
        dtype=checkpoint.weights_dtype(model),
        quantization=checkpoint.quantization(model, config),
        adapter=None,
        mode="one row at a time" if isinstance(batch, SequentialBatch) else settings.mode,
        backend=_backend(settings.ranks),
        versions=_text_versions() | ({} if images.codec is None else image_versions()),
        context_length=context_length,
        max_cached_tokens=memory_budget.max_cached_tokens(num_bytes, settings, cache_sizes),
        vocab_size=vocab_size,
        self_test=self_test,
        weights_bytes=num_bytes,
        memory_bytes=memory_budget.memory_bytes(settings),
        cache_sizes=cache_sizes,
        surveyed=is_surveyed,
        speculation="unsupported" if speculates and not batch.can_speculate else settings.speculation,
        speculation_tokens=settings.speculation_tokens if speculates and batch.can_speculate else 0,
        whole_prompts=whole_prompts,
        draft_context_length=0 if scorer is None else scorer.context_length,
        classifier=classified,
        pooling=None if classified else default_pooling(folder, config, tapped),
        images=None if images.codec is None else images.codec.family,
        images_unsupported=images.unsupported,
    )
    model_info = replace(model_info, verification=_verify(model_info, folder, settings))
    memory_budget.return_free_memory()  # loading and testing may need more than serving
    log.info("serves %s: %s", settings.model, model_info.summary())
    if ranks is not None:
        ranks.agree(_identity(model_info))
        batch = LeadingBatch(batch, ranks) if ranks.rank == 0 else batch
    if head is not None:
        return ClassifierRunner(batch, head, model_info, chat.tokenizer, chat)
    adapters = None if ranks else AdapterHost(adapted, model, Path(settings.weights_folder or folder), config)
    draft = draft if batch.can_speculate else None
    store = _open_prefix_store(settings, model_info, model, split) if batch.can_share else None
    scorer = scorer if whole_prompts is None else None
    # What puts features into the embeddings, and the head that reads prompts, are told of each pass from outside.
    is_told = images.split is not None or isinstance(draft, PredictionHead)
    is_alone = ranks is None and isinstance(batch, PaddedBatch)
    has_background = is_alone and not is_told and background.suits(model, split)
    return ModelRunner(batch, split, model_info, chat.tokenizer, chat, adapters, draft, store, scorer, has_background)


def _reason_for_whole_prompts(
    batch: BatchRunner,
    scorer: PromptScorer | None,
    model: Any,
    split: BackboneAndHead,
    vocab_size: int,
    context_length: int,
) -> str | None:
    """Say why no part of a prompt can be left out; None if it can, and let the model do it."""
    if scorer is None:
        return "the model is served without a draft model"
    if not isinstance(batch, PaddedBatch):
        is_exact = isinstance(batch, BatchInvariant)
        return "exact mode computes every token" if is_exact else "the model is served one row at a time"
    if scorer.fault is not None:
        return scorer.fault
    if (windows.smallest_window(model) or context_length) < context_length:
        return rope_positions.KEEPS_STATE  # a window counts the tokens that are there
    rope_positions.take_positions(model)
    return rope_positions.find_fault(model, split, vocab_size)


def _agree(ranks: RankGroup, fingerprint: str, settings: EngineSettings) -> EngineSettings:
    """Compare what the ranks have before their first exchange of a model. Return the settings of the smallest rank.

    Raises LoadError. Shares of different models would exchange sums of different shapes.
    """
    ranks.agree(
        {
            "fingerprint": fingerprint,
            "dtype": settings.dtype,
            "speculation": settings.speculation,
            "versions": json.dumps(_versions()),
            "backend": _backend(settings.ranks),
        }
    )
    return replace(settings, memory_bytes=ranks.smallest(memory_budget.memory_bytes(settings)))


def _versions() -> dict[str, str]:
    """Return the versions of what decides about the numbers of texts. Ours does, too: it corrects models."""
    return _text_versions() | {"scorepool": installed_version("scorepool")}


def _text_versions() -> dict[str, str]:
    return {name: installed_version(name) for name in ("mlx", "mlx-lm")}


def _open_prefix_store(
    settings: EngineSettings, model_info: ModelInfo, model: Any, split: BackboneAndHead
) -> PrefixStore | None:
    """Open the files of the model's computed prefixes, if settings give them room."""
    if not settings.prefix_disk_bytes:
        return None
    identity = json.dumps([*_identity(model_info).values()])
    with as_load_error(f"prefix_folder {settings.prefix_folder!r} cannot be used"):
        layout = prefix_file.layout_of(model, split, TILE if settings.mode == "exact" else 1)
        return PrefixStore(Path(str(settings.prefix_folder)), settings.prefix_disk_bytes, identity, layout)


def _identity(model_info: ModelInfo) -> dict[str, str]:
    """Return what decides about the numbers, by name."""
    names = ("fingerprint", "dtype", "quantization", "mode", "backend", "self_test")
    values = {name: getattr(model_info, name) for name in names} | {"versions": _versions()}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


def _load_draft(
    settings: EngineSettings, tokenizer: Tokenizer, vocab_size: int
) -> tuple[Any, DraftModel, PromptScorer]:
    """Load the draft model, and check that its vocabulary is the tokenizer's. Return it and its two uses."""
    source = str(settings.draft)
    with _as_fault_of_draft(source), as_load_error("it cannot be loaded"):
        folder = checkpoint.find_folder(source)
        model, config, position_limit = load_checked(folder, settings.dtype)
        other = checkpoint.load_chat_codec(folder, config).tokenizer
        if (difference := tokenizer.find_difference(other)) is not None:
            raise LoadError(f"it has another vocabulary: {difference}; expected one with the model's tokenizer")
        split = split_model(model)
        num_logits = count_logits(model)
        refuse_small_vocabulary(num_logits, tokenizer.token_ids)
        split = KnownTokens(split, num_logits)
        context_length = _context_length(config, position_limit)
        draft = DraftModel(model, split, vocab_size, context_length)
        return model, draft, PromptScorer(model, split, context_length)


@contextmanager
def _as_fault_of_draft(source: str) -> Iterator[None]:
    """Say of which of the two models a LoadError is."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"the draft model {source}: {error.message}") from error


def load_checked(
    folder: Path, dtype: str, *, checks_settings: bool = True, ranks: RankGroup | None = None
) -> tuple[Any, Config, int | None]:
    """Load the model, make it follow its configuration or raise LoadError, and return both and the context's limit.

    `checks_settings` is False if they were checked, and for the survey that makes the table of settings.
    """
    if checks_settings:
        _check_config(folder)
    with as_load_error(f"{folder} cannot be loaded"):
        model, config = checkpoint.load_weights(folder, dtype, ranks)
        limits = rope.check_or_patch(model, config), windows.check_or_patch(model, config)
        activations.patch(model, config)
        cpu_kernels.install(model, checkpoint.configured_context_length(config))
        cuda_rotary.install(model)
        cpu_norms.install(model)
        cpu_products.install(model)
    return model, config, min((limit for limit in limits if limit is not None), default=None)


def _verify(model_info: ModelInfo, folder: Path, settings: EngineSettings) -> Verification:
    """Look for a certificate of the model; raise LoadError if one is required and none fits."""
    served = certificate.Identity(
        fingerprint=model_info.fingerprint,
        dtype=model_info.dtype,
        mode=model_info.mode,
        backend=certificate.backend_kind(model_info.backend),
        versions=_versions(),
    )
    certificates = Path(settings.certificates) if settings.certificates else None
    found = certificate.verify(served, certificate.candidates(certificates, folder, model_info.fingerprint))
    if settings.require_certificate and found.reason is not None:
        raise LoadError(f"require_certificate is set, and {settings.model!r} is unverified: {found.reason}")
    return found


def _check_config(folder: Path) -> tuple[Config, bool]:
    """Return config.json, and whether all of its settings were surveyed. Raise LoadError for a wrong setting."""
    config = load_raw_config(folder)
    refuse_contradictions(config)
    checkpoint.import_architecture(config)
    with as_load_error("config.json"):
        return config, surveyed.check(config)


def _load_chat_codec(folder: Path, config: Config, settings: EngineSettings) -> ChatCodec:
    """Load the tokenizer. Before the weights: a vocabulary that is too small for it then has a reason that says so."""
    parsers = (settings.tool_parser, settings.reasoning_parser, settings.tool_repair)
    chat = checkpoint.load_chat_codec(folder, config, *parsers)
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    if vocab_size is not None:
        refuse_small_vocabulary(vocab_size, chat.tokenizer.token_ids)
    return chat


def count_logits(model: Any) -> int:
    """Run the first forward pass, of one token, and return the number of its logits. Raises LoadError."""
    for name, module in model.named_modules():
        is_16_bit = type(module).__name__ == "SwitchLinear" and module.weight.dtype.size == 2
        if is_16_bit and mx.default_device() == mx.cpu:
            dtype = str(module.weight.dtype).removeprefix("mlx.core.")
            raise LoadError(f"dtype is {dtype}, expected float32: MLX on a CPU multiplies experts ({name}) in no other")
    with as_load_error("the model fails in its first forward pass"):
        logits = model(mx.array([[0]]))
        mx.eval(logits)
    return int(logits.shape[-1])


def _backend(num_ranks: int = 1) -> str:
    """Name what decides about rounding beside the versions: the kernels, and the device that they are chosen for."""
    device = mx.device_info()
    if mx.default_device() == mx.cpu:
        numpy = f", numpy {installed_version('numpy')}" if cpu_kernels.are_used() else ""
        kind, details = "cpu", f"{device['architecture']}, {_BLAS}{numpy}"
    else:
        tf32 = ", tf32" if rounds_to_tf32() else ""
        kind, details = gpu_kind() or "gpu", f"{device['device_name']}{tf32}"
    return f"{kind} ({details}, {num_ranks} ranks)" if num_ranks > 1 else f"{kind} ({details})"


def _context_length(config: dict[str, Any], position_limit: int | None) -> int:
    configured = checkpoint.configured_context_length(config)
    if position_limit is None or position_limit >= configured:
        return configured
    log.warning(
        "the context is %d of the configured %d tokens: beyond it mlx-lm computes wrong positions",
        position_limit,
        configured,
    )
    return position_limit
