"""One step of a classifier: hidden states of the slices, and the head's logits of each sequence that they complete.

Every sequence is given whole, so there is nothing to sample and no step depends on the one before it.
"""

from dataclasses import dataclass
from math import isfinite
from typing import NoReturn

import mlx.core as mx

from scorepool.engine.adapter import Adapter
from scorepool.engine.errors import AdapterError, NonFiniteLogits
from scorepool.engine.model import garbage, memory_budget
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.classifier import compute_logits
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.sequence import Sequence
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is launched and not read yet."""

    slices: list[Slice]  # those that complete a sequence
    logits: mx.array | None  # [slices, labels] float32; None if there are none


class ClassifierRunner:
    """The steps of one classifier. Must be used on the thread that made the model."""

    can_speculate = has_background = False  # nothing is generated
    adapter_bytes = 0
    draft: None = None
    prompt_scorer: None = None
    prefix_store: None = None

    def __init__(
        self, batch: BatchRunner, head: mx.array, model_info: ModelInfo, tokenizer: Tokenizer, chat: ChatCodec
    ) -> None:
        """Start without sequences. `head` [labels, width] float32."""
        self.model_info = model_info
        self.tokenizer = tokenizer
        self.chat = chat
        self.can_share = batch.can_share
        self._batch = batch
        self._head = head

    def launch(self, output: SchedulerOutput) -> tuple[LaunchedStep, list[Sequence]]:
        """Start one step and return before it is computed. No sequence is ever paused."""
        hidden = [self._batch.prefill(forward) for forward in output.forwards]
        slices = [slice_ for slice_ in output.slices if slice_.predictors]
        if not slices:
            return LaunchedStep([], None), []
        logits = self._logits(mx.concatenate(hidden))
        mx.async_eval(logits)
        return LaunchedStep(slices, logits), []

    def read(self, step: LaunchedStep) -> list[SliceResult]:
        """Wait for a step and give the sequences their logits. An error marks one whose logits are not finite."""
        rows: list[list[float]] = [] if step.logits is None else step.logits.tolist()  # type: ignore[assignment]
        return [_result(slice_, logits) for slice_, logits in zip(step.slices, rows, strict=True)]

    def launch_background(self, forwards: list[list[Slice]]) -> NoReturn:
        """Refuse: there are no decoding rows beside which something could be computed."""
        raise RuntimeError("a classifier has no background")

    def max_proposed(self, position: int) -> int:
        """Return 0: no step verifies proposed tokens."""
        return 0

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""
        self._batch.release(sequences)

    def load_adapter(self, name: str, folder: str, max_bytes: int) -> Adapter:
        """Refuse: adapters of classifiers come with a head of their own."""
        raise AdapterError("the model is a classifier, expected a language model")

    def drop_adapters(self, adapters: list[Adapter]) -> None:
        """Do nothing; see `load_adapter`."""

    def take_over_adapters(self, closed: object) -> None:
        """Do nothing; see `load_adapter`."""

    def close(self) -> None:
        """Drop the weights and all caches, for good. What describes the model stays."""
        del self._batch, self._head
        garbage.collect()
        memory_budget.return_free_memory()

    def _logits(self, rows: mx.array) -> mx.array:
        """Return the logits [n, labels]. In exact mode each row runs alone: rounding depends on how many there are."""
        if self.model_info.mode == "exact":
            return mx.concatenate([compute_logits(row[None], self._head) for row in rows])
        return compute_logits(rows, self._head)


def _result(slice_: Slice, logits: list[float]) -> SliceResult:
    if not all(map(isfinite, logits)):
        bad = next(index for index, value in enumerate(logits) if not isfinite(value))
        error = NonFiniteLogits(
            f"the model's logit of label {bad} is {logits[bad]}, so the text has no class; another dtype may help"
        )
        return SliceResult(slice_, slice_.num_tokens, error)
    slice_.sequence.class_logits = logits
    return SliceResult(slice_, slice_.num_tokens)
