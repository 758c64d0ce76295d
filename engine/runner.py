"""One step of the model: hidden states of the plan's rows, logits where they are asked for, columns filled.

plan ──batch──► hidden rows ──head──► logits [chunk of rows, vocab] ──measure──► entries ──► Sequence columns
"""

from math import isfinite, isnan

import mlx.core as mx

from engine.batch import Batch
from engine.errors import EngineError, Numeric
from engine.facts import Facts
from engine.measure import Ask, Entry, measure
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.stop import end_if_done
from engine.tap import Halves
from engine.tokenizer import Tokenizer

LOGITS_BYTES = 64 * 2**20  # of one chunk of rows, in the model's dtype and in float32


class ModelRunner:
    """To be used on no other thread than the one that made the model."""

    def __init__(self, batch: Batch, halves: Halves, facts: Facts, tokenizer: Tokenizer) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self._batch = batch
        self._halves = halves

    def run(self, plan: Plan) -> dict[Sequence, EngineError]:
        """Do one step. Returns the rows whose logits are no distribution; their columns are of no use."""
        asks = [Ask(sequence, len(sequence.token_ids)) for sequence in plan.decode]
        hidden = [self._batch.decode(plan.decode)] if plan.decode else []  # before new rows join its cache
        for chunks in plan.prefill:
            asks += [Ask(chunk.sequence, position + 1) for chunk in chunks for position in chunk.predictors]
            hidden.append(self._batch.prefill(chunks))
        rows = mx.concatenate(hidden)
        failed: dict[Sequence, EngineError] = {}
        step = rows_at_once(self.facts.vocab_size, rows.dtype.size)
        for start in range(0, len(asks), step):
            part = asks[start : start + step]
            logits = self._halves.head(rows[start : start + step]).astype(mx.float32)
            for ask, entry in zip(part, measure(part, logits), strict=True):
                self._record(ask, entry, failed)
        if plan.prefill:
            mx.clear_cache()  # buffers of this prefill's shape, which the next one has no use for
        return failed

    def release(self, sequences: list[Sequence]) -> None:
        self._batch.release(sequences)

    def _record(self, ask: Ask, entry: Entry, failed: dict[Sequence, EngineError]) -> None:
        sequence = ask.sequence
        if sequence in failed:
            return
        if not isfinite(entry.normalizer) or isnan(entry.logprob):
            failed[sequence] = Numeric(
                f"the model's logits for the token at position {ask.position} are not finite, "
                "so no logprob exists; another dtype may help"
            )
            return
        append(sequence, entry)
        if ask.is_sampled:
            end_if_done(sequence, self.tokenizer.token_bytes, self.tokenizer.eos_ids)


def rows_at_once(vocab_size: int, item_size: int) -> int:
    """How many rows of logits fit into LOGITS_BYTES beside their float32 copy."""
    return max(1, LOGITS_BYTES // (vocab_size * (item_size + 4)))


def append(sequence: Sequence, entry: Entry) -> None:
    """One more entry in every column that was asked for; of a sampled token, the token too."""
    sequence.logprobs.append(entry.logprob)
    if entry.top_ids is not None and entry.top_values is not None:
        likeliest = list(zip(entry.top_ids, entry.top_values, strict=True))[: sequence.top_logprobs]
        likeliest.sort(key=lambda top: (-top[1], top[0]))  # float32 logprobs may be equal where logits were not
        sequence.top_ids.append([token_id for token_id, _ in likeliest])
        sequence.top_values.append([value for _, value in likeliest])
    if entry.rank is not None:
        sequence.ranks.append(entry.rank)
    if entry.entropy is not None:
        sequence.entropies.append(entry.entropy)
    if entry.sampled_logprob is not None:
        sequence.sampled_logprobs.append(entry.sampled_logprob)
        sequence.token_ids.append(entry.token_id)
