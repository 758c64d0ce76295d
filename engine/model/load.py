"""Open a model: load the checkpoint, check or patch it, test it, and describe it. Import on the MLX thread.

The BLAS is loaded first, before anything imports mlx.
"""

# ruff: noqa: E402 - the BLAS must be loaded before mlx
from scorepool.engine.model import blas

_BLAS = blas.load()

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from scorepool.engine import certificate
from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.model import activations, checkpoint, kv_cache, memory_budget, rope, surveyed
from scorepool.engine.model.backbone import BackboneAndHead, split_model
from scorepool.engine.model.batch import TILE, BatchInvariant, BatchRunner, PaddedBatch, SequentialBatch
from scorepool.engine.model.config import Config, load_raw_config
from scorepool.engine.model.contradictions import refuse_contradictions, refuse_small_vocabulary
from scorepool.engine.model.runner import ModelRunner
from scorepool.engine.model.selftest import SHARING, FailedCheck, SelfTest, find_degeneracy, trial_rows
from scorepool.engine.model.skipped_layers import skip_equal_layers
from scorepool.engine.model_info import ModelInfo, Verification
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.versions import installed_version

log = logging.getLogger(__name__)

# Architectures that batches of long rows make wrong. The few tokens of the self-test do not show it.
_WRONG_IN_LONG_BATCHES = dict.fromkeys(
    ("minimax_m3_vl", "phi3small"),
    "its sparse attention chooses blocks of cache slots, which the padding of a batch moves",
)


def open_model(settings: EngineSettings) -> ModelRunner:
    """Load, check, split and self-test the model; raise LoadError if its numbers cannot be trusted."""
    folder = checkpoint.find_folder(settings.model)
    config, is_surveyed = _check_config(folder)
    chat = _load_chat_codec(folder, config)
    model, config, position_limit = load_checked(folder, settings.dtype, checks_settings=False)
    mx.set_cache_limit(memory_budget.CACHE_LIMIT_BYTES)
    split = split_model(model)
    vocab_size = _vocab_size(model)
    refuse_small_vocabulary(vocab_size, chat.tokenizer.token_ids)  # config.json may leave vocab_size out
    context_length = _context_length(config, position_limit)
    batch, self_test = _choose_batch(model, split, vocab_size, settings.mode, context_length)
    model_info = ModelInfo(
        fingerprint=checkpoint.fingerprint(folder),
        dtype=checkpoint.weights_dtype(model),
        quantization=checkpoint.quantization(config),
        adapter=None,
        mode=settings.mode if isinstance(batch, PaddedBatch | BatchInvariant) else "one row at a time",
        backend=_backend(),
        versions={name: installed_version(name) for name in ("mlx", "mlx-lm")},
        context_length=context_length,
        max_cached_tokens=memory_budget.max_cached_tokens(model, settings),
        vocab_size=vocab_size,
        self_test=self_test,
        surveyed=is_surveyed,
    )
    model_info = replace(model_info, verification=_verify(model_info, folder, settings))
    log.info("serving %s: %s", settings.model, model_info)
    return ModelRunner(batch, split, model_info, chat.tokenizer, chat)


def load_checked(folder: Path, dtype: str, *, checks_settings: bool = True) -> tuple[Any, Config, int | None]:
    """Load the model, make it follow its configuration or raise LoadError, and return both and the context's limit.

    `checks_settings` is False if they were checked, and for the survey that makes the table of settings.
    """
    if checks_settings:
        _check_config(folder)
    with as_load_error(f"{folder} cannot be loaded"):
        model, config = checkpoint.load_weights(folder, dtype)
        position_limit = rope.check_or_patch(model, config)
        activations.check_or_patch(model, config)
    return model, config, position_limit


def _verify(model_info: ModelInfo, folder: Path, settings: EngineSettings) -> Verification:
    """Look for a certificate of the model; raise LoadError if one is required and none fits."""
    served = certificate.Identity(
        fingerprint=model_info.fingerprint,
        dtype=model_info.dtype,
        mode=model_info.mode,
        backend=certificate.backend_kind(model_info.backend),
        versions={"scorepool": installed_version("scorepool"), **model_info.versions},
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


def _load_chat_codec(folder: Path, config: Config) -> ChatCodec:
    """Load the tokenizer. Before the weights: a vocabulary that is too small for it then has a reason that says so."""
    chat = checkpoint.load_chat_codec(folder, config)
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    if vocab_size is not None:
        refuse_small_vocabulary(vocab_size, chat.tokenizer.token_ids)
    return chat


def _vocab_size(model: Any) -> int:
    """Run the first forward pass, of one token, and return the number of its logits."""
    for name, module in model.named_modules():
        is_16_bit = type(module).__name__ == "SwitchLinear" and module.weight.dtype.size == 2
        if is_16_bit and mx.default_device() == mx.cpu:
            dtype = str(module.weight.dtype).removeprefix("mlx.core.")
            raise LoadError(f"dtype is {dtype}, expected float32: MLX on a CPU multiplies experts ({name}) in no other")
    with as_load_error("the model fails in its first forward pass"):
        logits = model(mx.array([[0]]))
        mx.eval(logits)
    return int(logits.shape[-1])


def _choose_batch(
    model: Any, split: BackboneAndHead, vocab_size: int, mode: str, context_length: int
) -> tuple[BatchRunner, str]:
    """Return the fastest batch runner that passes its self-test, and the outcome; raise LoadError if none passes."""
    if degeneracy := find_degeneracy(model(mx.array(trial_rows(vocab_size)[:1]))[0]):
        raise LoadError(degeneracy)
    is_exact = mode == "exact"
    new_self_test = partial(
        SelfTest,
        split,
        vocab_size,
        context_length,
        window=kv_cache.smallest_window(kv_cache.new(model)),
        tile=TILE if is_exact else None,
    )
    exact = partial(BatchInvariant, context_length=context_length)
    kinds = (exact,) if is_exact else (PaddedBatch, SequentialBatch)
    faults: list[str] = []
    if not is_exact and (reason := _WRONG_IN_LONG_BATCHES.get(type(model).__module__.rpartition(".")[2])):
        kinds, faults = (SequentialBatch,), [reason]
    batch: BatchRunner = kinds[0](model, split)
    if not faults and (outcome := _pass_with_few_layers(model, batch, new_self_test)):
        return batch, outcome
    self_test = new_self_test()
    for kind in kinds:
        batch = kind(model, split)
        fault = self_test.find_fault(batch)
        if fault is not None and fault.name == SHARING:
            log.warning("prompts are not shared: %s", fault)
            batch = kind(model, split, can_share=False)
            if self_test.find_fault(batch) is None:
                return batch, f"{self_test.outcome}; every row computes its whole prompt: {fault}"
        if fault is None:
            return batch, f"served one row at a time: {faults[0]}" if faults else self_test.outcome
        log.warning("%s of %s failed its self-test: %s", type(batch).__name__, type(model).__module__, fault)
        faults.append(str(fault))
    raise LoadError(f"the model failed its self-test: {'; one row at a time, '.join(faults)}")


def _pass_with_few_layers(model: Any, batch: BatchRunner, new_self_test: Callable[[], SelfTest]) -> str | None:
    """Return the outcome if the batch has no fault with a few layers of each kind; else all layers must be tested."""
    with skip_equal_layers(model) as num_skipped:
        if not num_skipped:
            return None
        try:
            self_test = new_self_test()
            fault = self_test.find_fault(batch)
        except Exception as error:  # any: an architecture that needs every layer
            fault = FailedCheck("a model", f"raises {type(error).__name__}: {error}")
    if fault is not None:
        log.info("the self-test runs with all layers, because without %d of them %s", num_skipped, fault)
    return self_test.outcome if fault is None else None


def _backend() -> str:
    """Name what decides about rounding beside the versions: the kernels, and the device that they are chosen for."""
    device = mx.device_info()
    if mx.default_device() == mx.cpu:
        return f"cpu ({device['architecture']}, {_BLAS})"
    return f"{'metal' if mx.metal.is_available() else 'cuda'} ({device['device_name']})"


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
