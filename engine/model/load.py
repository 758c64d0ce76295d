"""Open a model: load the checkpoint, check or patch it, test it, and describe it. Import on the MLX thread.

The BLAS is loaded first, before anything imports mlx.
"""

# ruff: noqa: E402 - the BLAS must be loaded before mlx
from scorepool.engine.model import blas

_BLAS = blas.load()

import logging
import time
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.model import activations, checkpoint, kv_cache, memory_budget, rope
from scorepool.engine.model.backbone import BackboneAndHead, split_model
from scorepool.engine.model.batch import BatchInvariant, BatchRunner, PaddedBatch, SequentialBatch
from scorepool.engine.model.runner import ModelRunner
from scorepool.engine.model.selftest import SHARING, find_fault, reference_logprobs, trial_rows, window_row
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.settings import EngineSettings

log = logging.getLogger(__name__)


def open_model(settings: EngineSettings) -> ModelRunner:
    """Load, check, split and self-test the model; raise LoadError if its numbers cannot be trusted."""
    folder = checkpoint.find_folder(settings.model)
    model, config = checkpoint.load_weights(folder, settings.dtype)
    position_limit = rope.check_or_patch(model, config)
    activations.check_or_patch(model, config)
    chat = checkpoint.load_chat_codec(folder, config)
    mx.set_cache_limit(memory_budget.CACHE_LIMIT_BYTES)
    split = split_model(model)
    vocab_size = int(model(mx.array([[0]])).shape[-1])
    batch, self_test = _choose_batch(model, split, vocab_size, settings.mode)
    model_info = ModelInfo(
        fingerprint=checkpoint.fingerprint(folder),
        dtype=checkpoint.weights_dtype(model),
        quantization=checkpoint.quantization(config),
        adapter=None,
        mode=settings.mode if isinstance(batch, PaddedBatch | BatchInvariant) else "one row at a time",
        backend=_backend(),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        context_length=_context_length(config, position_limit),
        max_cached_tokens=memory_budget.max_cached_tokens(model, settings),
        vocab_size=vocab_size,
        self_test=self_test,
    )
    log.info("serving %s: %s", settings.model, model_info)
    return ModelRunner(batch, split, model_info, chat.tokenizer, chat)


def _choose_batch(model: Any, split: BackboneAndHead, vocab_size: int, mode: str) -> tuple[BatchRunner, str]:
    """Return the fastest batch runner that passes its self-test, and the outcome; raise LoadError if none passes."""
    rows = trial_rows(vocab_size)
    reference, seconds = _timed_reference(model, rows)
    if not all(mx.isfinite(mx.logsumexp(logprobs)).item() for logprobs in reference):
        raise LoadError("the model's logits for a few test tokens are not finite; another dtype may help")
    window = kv_cache.smallest_window(kv_cache.new(model))
    longest = window_row(window, vocab_size, seconds) if window else None
    if window and not longest:  # measure again: the first forward is slower, and the machine may have stalled
        longest = window_row(window, vocab_size, _timed_reference(model, rows)[1])
    passed = f"passed; too slow to test beyond its window of {window} tokens" if window and not longest else "passed"
    faults: list[str] = []
    for kind in (BatchInvariant,) if mode == "exact" else (PaddedBatch, SequentialBatch):
        batch: BatchRunner = kind(model, split)
        fault = find_fault(batch, split, reference, rows, longest)
        if fault is not None and fault.name == SHARING:
            log.warning("prompts are not shared: %s", fault)
            batch = kind(model, split, can_share=False)
            if find_fault(batch, split, reference, rows, longest) is None:
                return batch, f"{passed}; every row computes its whole prompt: {fault}"
        if fault is None:
            return batch, f"served one row at a time: {faults[0]}" if faults else passed
        log.warning("%s of %s failed its self-test: %s", kind.__name__, type(model).__module__, fault)
        faults.append(str(fault))
    raise LoadError(f"the model failed its self-test: {'; one row at a time, '.join(faults)}")


def _timed_reference(model: Any, rows: list[list[int]]) -> tuple[list[mx.array], float]:
    """Return the rows' reference logprobs and the seconds that they took."""
    started = time.perf_counter()
    reference = reference_logprobs(model, rows)
    mx.eval(reference)
    return reference, time.perf_counter() - started


def _backend() -> str:
    if mx.default_device() == mx.cpu:
        return f"cpu ({_BLAS})"
    return "metal" if mx.metal.is_available() else "cuda"


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
