"""Choose how rows run: the fastest way that passes the self-test, with a few layers of each kind if they suffice.

What is known to be wrong is not tried: the self-test has few tokens, and in 16 bits it takes small faults for rounding.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.model import windows
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.batch_invariant import TILE, BatchInvariant
from scorepool.engine.model.padded_batch import PaddedBatch
from scorepool.engine.model.selftest import SHARING, SPECULATION, SelfTest, find_degeneracy, trial_rows
from scorepool.engine.model.sequential_batch import SequentialBatch
from scorepool.engine.model.skipped_layers import skip_equal_layers

log = logging.getLogger(__name__)

_BLOCKS_OF_SLOTS = ("minimax_m3_vl", "phi3small")
_STATES_WITHOUT_LENGTHS = (
    *("baichuan_m1", "bailing_moe_linear", "jamba", "longcat_flash_ngram", "mamba", "olmo_hybrid", "recurrent_gemma"),
    "rwkv7",
)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run rows, and what the outcome says of it if the ways before it have faults."""

    new_batch: Callable[..., BatchRunner]
    description: str


_PADDED = _Way(PaddedBatch, "")
_PADDED_AFTER_PROMPTS = _Way(
    partial(PaddedBatch, pads_prompts=False), "passed; prompts of different lengths run one after the other"
)
_SEQUENTIAL = _Way(SequentialBatch, "served one row at a time")


def choose_batch(
    model: Any,
    split: BackboneAndHead,
    vocab_size: int,
    mode: str,
    context_length: int,
    speculates: bool = False,
    all_agree: Callable[[bool], bool] = bool,
) -> tuple[BatchRunner, str]:
    """Return the fastest batch runner that passes its self-test, and the outcome; raise LoadError if none passes.

    The verification of proposed tokens is tested if it `speculates`; a batch that fails has no `can_speculate`.
    """
    if degeneracy := find_degeneracy(model(mx.array(trial_rows(vocab_size)[:1]))[0]):
        raise LoadError(degeneracy)
    ways, faults = _ways(model, mode, context_length)
    new_self_test = partial(
        SelfTest,
        split,
        vocab_size,
        context_length,
        window=windows.smallest_window(model),
        tile=TILE if mode == "exact" else None,
        speculates=speculates,
        all_agree=all_agree,
    )
    chosen = _choose_with_few_layers(ways, faults, model, split, new_self_test)
    return chosen or _choose(ways, faults, model, split, new_self_test())


def _ways(model: Any, mode: str, context_length: int) -> tuple[list[_Way], list[str]]:
    """Return the ways to try, fastest first, and the known faults of those before them."""
    if mode == "exact":
        return [_Way(partial(BatchInvariant, context_length=context_length), "")], []
    architecture = type(model).__module__.rpartition(".")[2]
    if architecture in _BLOCKS_OF_SLOTS:
        return [_SEQUENTIAL], ["its sparse attention cuts blocks by cache slots, which the padding of a batch moves"]
    if architecture in _STATES_WITHOUT_LENGTHS:
        return [_PADDED_AFTER_PROMPTS, _SEQUENTIAL], ["padding in a batch changes its recurrent state"]
    return [_PADDED, _PADDED_AFTER_PROMPTS, _SEQUENTIAL], []


def _choose_with_few_layers(
    ways: list[_Way],
    faults: list[str],
    model: Any,
    split: BackboneAndHead,
    new_self_test: Callable[[], SelfTest],
) -> tuple[BatchRunner, str] | None:
    """Choose as `_choose` does, with a few layers of each kind; None if all layers must be tested."""
    with skip_equal_layers(model) as num_skipped:
        if not num_skipped:
            return None
        try:
            batch, outcome = _choose(ways, faults, model, split, new_self_test())
        except Exception as error:  # any: an architecture that needs every layer
            log.info("the self-test runs with all layers; without %d of them: %s", num_skipped, error)
            return None
    return None if isinstance(batch, SequentialBatch) else (batch, outcome)


def _choose(
    ways: list[_Way], earlier_faults: list[str], model: Any, split: BackboneAndHead, self_test: SelfTest
) -> tuple[BatchRunner, str]:
    faults = list(earlier_faults)
    for way in ways:
        batch = way.new_batch(model, split)
        outcome = f"{way.description}: {faults[0]}" if faults else self_test.outcome
        fault = self_test.find_fault(batch)
        if fault is not None and fault.name == SPECULATION:
            log.warning("no tokens are proposed: %s", fault)
            batch = way.new_batch(model, split)  # one whose check raised is not empty
            batch.can_speculate = False
            outcome, fault = f"{outcome}; no tokens are proposed: {fault}", self_test.find_fault(batch)
        if fault is not None and fault.name == SHARING:
            log.warning("prompts are not shared: %s", fault)
            can_speculate = batch.can_speculate
            batch = way.new_batch(model, split, can_share=False)
            batch.can_speculate = can_speculate
            outcome, fault = (
                f"{outcome}; every row computes its whole prompt: {fault}",
                self_test.find_fault(batch),
            )
        if fault is None:
            return batch, outcome
        log.warning("%s of %s failed its self-test: %s", type(batch).__name__, type(model).__module__, fault)
        faults.append(str(fault))
    raise LoadError(f"the model failed its self-test: {'; one row at a time, '.join([faults[0], *faults[1:][-1:]])}")
