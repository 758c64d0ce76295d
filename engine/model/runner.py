"""One step of the model: hidden states of the plan's rows, logits where they are asked for, columns filled.

plan ──batch──► hidden rows ──head──► logits [chunk of rows, vocab] ──compute_logprobs──► entries ──► Sequence columns
└────────────────────────────── launch ────────────────────────────┘            └───────── read ────────────┘

`launch` returns while the device computes, so that the host reads step n while step n + 1 runs. A row's next
token goes from step to step on the device.
"""

from dataclasses import dataclass
from math import isfinite, isnan

import mlx.core as mx

from scorepool.engine.errors import EngineError, NonFiniteLogits
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.sampling.logprobs import LogprobQuery, PendingLogprobs, TokenLogprobs, compute_logprobs
from scorepool.engine.sampling.stop import check_stop, min_tokens_banned_ids
from scorepool.engine.scheduling.scheduler import Plan
from scorepool.engine.sequence import Sequence
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer

LOGITS_BYTES = 64 * 2**20  # of one chunk of rows, in the model's dtype and in float32
EXACT_ROWS = 16  # of every head in exact mode


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Launched, not read yet."""

    parts: list[PendingLogprobs]


class ModelRunner:
    """To be used on no other thread than the one that made the model."""

    def __init__(
        self,
        batch: BatchRunner,
        halves: BackboneAndHead,
        model_info: ModelInfo,
        tokenizer: Tokenizer,
        chat: ChatCodec,
    ) -> None:
        self.model_info = model_info
        self.tokenizer = tokenizer
        self.chat = chat
        self.can_share = batch.can_share
        self._batch = batch
        self._halves = halves
        self._sampled: dict[Sequence, int] = {}  # rows of the last launch that sampled a token: where it is below
        self._token_ids = mx.array([], dtype=mx.int32)  # of all asks of the last launch

    def launch(self, plan: Plan) -> LaunchedStep:
        asks: list[LogprobQuery] = []
        hidden: list[mx.array] = []
        if plan.decode:  # before new rows join its cache
            last_ids = self._last_ids(plan.decode)
            asks = [
                self._ask(
                    row, row.num_computed + 1, last_ids[place : place + 1] if row.needs_logits_processing else None
                )
                for place, row in enumerate(plan.decode)
            ]
            hidden = [self._batch.decode(plan.decode, last_ids)]
        for chunks in plan.prefill:
            asks += [self._ask(chunk.sequence, position + 1) for chunk in chunks for position in chunk.predictors]
            hidden.append(self._batch.prefill(chunks))
        rows = mx.concatenate(hidden)
        if any(ask.sequence.constraint is not None for ask in asks):
            mx.async_eval(rows)  # while the host reads which tokens came before, and finds out what may follow them
        parts = self._measure(asks, rows)
        asks = [ask for part in parts for ask in part.asks]
        self._sampled = {ask.sequence: index for index, ask in enumerate(asks) if ask.is_sampled}
        self._token_ids = mx.concatenate([part.token_ids for part in parts]) if parts else mx.array([], dtype=mx.int32)
        return LaunchedStep(parts)

    def read(self, step: LaunchedStep) -> dict[Sequence, EngineError | None]:
        """The rows that have new entries; with an error, those whose logits are no distribution."""
        read: dict[Sequence, EngineError | None] = {}
        for part in step.parts:
            for ask, entry in zip(part.asks, part.read(), strict=True):
                if ask.sequence.finish_reason is None and read.get(ask.sequence) is None:
                    read[ask.sequence] = self._record(ask, entry)
        return read

    def release(self, sequences: list[Sequence]) -> None:
        self._batch.release(sequences)

    def _ask(self, sequence: Sequence, position: int, last_id: mx.array | None = None) -> LogprobQuery:
        barred = min_tokens_banned_ids(sequence, position, self.tokenizer.eos_ids) if sequence.sampling else frozenset()
        return LogprobQuery(sequence, position, last_id, barred)

    def _last_ids(self, sequences: list[Sequence]) -> mx.array:
        """[rows]: the tokens that the last launch samples, known to the host or not."""
        index = [self._sampled[sequence] for sequence in sequences]
        is_all = index == list(range(self._token_ids.shape[0]))  # nothing was prefilled since, and nobody left
        return self._token_ids if is_all else self._token_ids[mx.array(index)]

    def _measure(self, asks: list[LogprobQuery], rows: mx.array) -> list[PendingLogprobs]:
        """In chunks of rows, each awaited before the next: no more than LOGITS_BYTES of logits are there at a time."""
        parts: list[PendingLogprobs] = []
        if self.model_info.mode == "exact":
            for slots in _slotted(asks):
                _await_last(parts)
                parts.append(self._measure_slots(asks, rows, slots))
            return parts
        step = rows_at_once(self.model_info.vocab_size, rows.dtype.size)
        for start in range(0, len(asks), step):
            _await_last(parts)
            parts.append(compute_logprobs(asks[start : start + step], self._logits(rows[start : start + step])))
        return parts

    def _measure_slots(self, asks: list[LogprobQuery], rows: mx.array, slots: dict[int, int]) -> PendingLogprobs:
        """A head of EXACT_ROWS rows, the asks' in their slots, anything in the others."""
        index = [slots.get(slot, 0) for slot in range(EXACT_ROWS)]
        logits = self._logits(rows[mx.array(index)])
        taken = sorted(slots, key=lambda slot: slots[slot])
        return compute_logprobs([asks[slots[slot]] for slot in taken], logits[mx.array(taken)])

    def _logits(self, rows: mx.array) -> mx.array:
        return self._halves.compute_logits(rows).astype(mx.float32)

    def _record(self, ask: LogprobQuery, entry: TokenLogprobs) -> EngineError | None:
        if not isfinite(entry.normalizer) or isnan(entry.logprob):
            return NonFiniteLogits(
                f"the model's logits for the token at position {ask.position} are not finite, "
                "so no logprob exists; another dtype may help"
            )
        append(ask.sequence, entry)
        if ask.is_sampled:
            check_stop(ask.sequence, self.tokenizer.token_bytes, self.tokenizer.eos_ids)
        return None


def _await_last(parts: list[PendingLogprobs]) -> None:
    if parts:
        mx.eval(parts[-1].arrays)


def rows_at_once(vocab_size: int, item_size: int) -> int:
    """How many rows of logits fit into LOGITS_BYTES beside what is computed of them in float32."""
    return max(1, LOGITS_BYTES // (vocab_size * (item_size + 4)))


def _slotted(asks: list[LogprobQuery]) -> list[dict[int, int]]:
    """For each head of exact mode: in which of its rows, the slot, which ask stands.

    A row's rounding may depend on its place in the block that a kernel is given, so a token's place follows from its
    position. A sequence's asks keep their order over the heads.
    """
    heads: list[dict[int, int]] = []
    last: dict[Sequence, int] = {}  # the head that a sequence's asks have come to
    free: dict[int, int] = {}  # the first head behind those where a slot is taken
    for index, ask in enumerate(asks):
        slot = ask.position % EXACT_ROWS
        head = max(last.get(ask.sequence, 0), free.get(slot, 0))
        if head == len(heads):
            heads.append({})
        heads[head][slot] = index
        last[ask.sequence], free[slot] = head, head + 1
    return heads


def append(sequence: Sequence, entry: TokenLogprobs) -> None:
    """One more entry in every column that was asked for; of a sampled token, the token too."""
    columns = sequence.columns
    columns.logprobs.append(entry.logprob)
    if entry.top_ids is not None and entry.top_values is not None:
        likeliest = list(zip(entry.top_ids, entry.top_values, strict=True))[: sequence.top_logprobs]
        likeliest.sort(key=lambda top: (-top[1], top[0]))  # float32 logprobs may be equal where logits were not
        columns.top_ids.append([token_id for token_id, _ in likeliest])
        columns.top_logprobs.append([value for _, value in likeliest])
    if entry.rank is not None:
        columns.ranks.append(entry.rank)
    if entry.entropy is not None:
        columns.entropies.append(entry.entropy)
    if entry.sampled_logprob is not None:
        columns.sampled_logprobs.append(entry.sampled_logprob)
        sequence.token_ids.append(entry.token_id)
