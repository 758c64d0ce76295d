"""What the engine's core asks of a loaded model. model/runner.py is one that runs on MLX."""

from typing import Any, Protocol

from scorepool.engine.adapter import Adapter
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.scheduling.prefix_cache import Store
from scorepool.engine.scheduling.prompt_selection import PromptScorer
from scorepool.engine.scheduling.proposals import Draft
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.sequence import Sequence
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer


class BackgroundJob(Protocol):
    """What a runner computes beside the steps."""

    def done(self) -> bool:
        """Return True if it is computed, and no thread works on it any more."""

    def result(self) -> Any:
        """Wait for it, and return its handle for `Runner.read`. Raises what it raised."""


class Runner(Protocol):
    """A loaded model. Make, use and drop it on the MLX thread. Read steps in the order of their launch."""

    model_info: ModelInfo
    tokenizer: Tokenizer
    chat: ChatCodec
    can_share: bool  # sequences can continue from a prefix that was computed for several
    can_speculate: bool  # a step can verify proposed tokens

    @property
    def has_background(self) -> bool:
        """True if prompts can be computed beside the steps, now."""

    @property
    def prefix_store(self) -> Store | None:
        """The store of computed prefixes, if there is one. It ends with the runner."""

    @property
    def draft(self) -> Draft | None:
        """The model that proposes tokens, if there is one."""

    @property
    def prompt_scorer(self) -> PromptScorer | None:
        """What says which tokens of a prompt matter, if something can."""

    def launch(self, output: SchedulerOutput) -> tuple[Any, list[Sequence]]:
        """Start one step. Return its handle for `read`, and the sequences that it pauses: see Scheduler."""

    def launch_background(self, forwards: list[list[Slice]]) -> "BackgroundJob":
        """Start forward passes of slices that need no cache, beside the next steps."""

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens after the token at `position` a step can verify."""

    def read(self, step: Any) -> list[SliceResult]:
        """Wait for a step and append to the columns. Return a result for each slice that gave new entries.

        Rejected tokens are dropped from the caches.
        """

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""

    @property
    def adapter_bytes(self) -> int:
        """The memory that the loaded adapters take."""

    def load_adapter(self, name: str, folder: str, max_bytes: int) -> Adapter:
        """Load an adapter beside the others, which take at most `max_bytes` together. Raises AdapterError."""

    def drop_adapters(self, adapters: list[Adapter]) -> None:
        """Drop adapters that no sequence has."""

    def take_over_adapters(self, closed: Any) -> None:
        """Take the adapters of a closed runner of the same model."""

    def close(self) -> None:
        """Drop the weights and all caches, for good. What describes the model stays."""
