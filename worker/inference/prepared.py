"""Hold a sequence on its way through the engine, with what its result says beside it."""

import dataclasses
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from scorepool import wire
from scorepool.engine import Sequence
from scorepool.engine.errors import EngineError
from scorepool.worker.inference.chat_answer import ChatPrompt
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.rq.errors import JobError


@dataclass(frozen=True, slots=True)
class PreparedSequence:
    """A sequence, and what the result reports about it that the engine does not know."""

    sequence: Sequence
    num_prompt_tokens: int
    is_prompt_text: bool  # or may be cut; then the result returns the ids that were used
    bos_added: bool
    chat_prompt: ChatPrompt | None = None  # of a sequence that answers a chat
    skipped_ids: AbstractSet[int] = frozenset()  # tokens that the text leaves out
    names_targets: bool = False  # the result has the bytes of its targets
    recomputed: Sequence | None = None  # the generated tokens, to be scored again
    num_truncated: int = 0  # tokens that were cut
    cached: bool = False  # its values were not computed for this job
    is_restored: bool = False  # an earlier run of the job has computed it
    failure: wire.Failure | None = None  # of an item that is reported beside the others; then `sequence` is not run

    @property
    def is_to_run(self) -> bool:
        """True if the engine must compute it."""
        return self.failure is None and not self.is_restored

    def with_error(self, index: int, error: EngineError) -> "PreparedSequence":
        """Return item number `index`, which the engine refused or could not continue, with its failure."""
        mapped = map_engine_error(error)
        if not isinstance(mapped, JobError):
            raise mapped
        field = f"items[{index}]"
        failure = replace(mapped.failure, message=f"{field}: {mapped.failure.message}", field=field)
        return dataclasses.replace(self, sequence=Sequence(token_ids=[]), num_prompt_tokens=0, failure=failure)

    def with_recompute(self) -> "PreparedSequence":
        sequence = self.sequence
        recomputed = Sequence(
            token_ids=list(sequence.token_ids),
            images=sequence.images,
            score_from=sequence.num_input_tokens,
            temperature=sequence.temperature,
            share=sequence.share,
            prefix_scope=sequence.prefix_scope,
            adapter_name=sequence.adapter_name,
        )
        return dataclasses.replace(self, recomputed=recomputed)


def share_equal(prepared: list[PreparedSequence]) -> list[PreparedSequence]:
    """Let items of a classify or embed job with the same tokens have one sequence, which is computed once.

    Computed side by side they may differ in the last bit, because rounding depends on a row's place in a batch.
    """
    first: dict[Hashable, Sequence] = {}
    shared: list[PreparedSequence] = []
    for each in prepared:
        if each.is_to_run:
            sequence = each.sequence
            images = tuple((image.digest, image.start) for image in sequence.images)
            each = dataclasses.replace(each, sequence=first.setdefault((*sequence.token_ids, images), sequence))
        shared.append(each)
    return shared


def to_run(prepared: list[PreparedSequence]) -> list[Sequence]:
    """Return the sequences that the engine must compute, each once."""
    return list(dict.fromkeys(each.sequence for each in prepared if each.is_to_run))
