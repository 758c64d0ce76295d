"""One step of the model: hidden states of the slices, logits of the rows that are needed, columns of the sequences.

slices ──batch──► hidden rows ──head──► logits [chunk of rows, vocab] ──logprobs──► values ──► Sequence.columns
└─────────────────────────────── launch ───────────────────────────────┘           └───────── read ─────────┘

`launch` returns while the device computes, so that the host reads step n while step n + 1 runs. A sequence's next
token goes from step to step on the device.
"""

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from scorepool.engine.adapter import Adapter
from scorepool.engine.errors import AdapterError, NonFiniteLogits
from scorepool.engine.model import background, cpu_kernels, cpu_logprobs, garbage, memory_budget, pooling
from scorepool.engine.model.adapters.host import AdapterHost
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.cpu_threads import one_thread_a_product
from scorepool.engine.model.draft import DraftModel
from scorepool.engine.model.mtp import PredictionHead
from scorepool.engine.model.pooling import PooledStep
from scorepool.engine.model.prefix_store import PrefixStore
from scorepool.engine.model.prompt_scorer import PromptScorer
from scorepool.engine.model.ranks.leader import LeadingBatch
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.sampling.logprobs import OnHost, PendingLogprobs, TokenLogprobs, compute_logprobs, split_rows
from scorepool.engine.sampling.next_token import ask_constraints, find_late
from scorepool.engine.sampling.query import LogprobQuery, UnreadToken
from scorepool.engine.sampling.stop import check_stop
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.sequence import Sequence
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer

LOGITS_BYTES = 64 * 2**20  # of one chunk of rows, in the model's dtype and in float32
EXACT_ROWS = 16  # rows of every head in exact mode


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is launched and not read yet."""

    slices: dict[Sequence, Slice]  # those that are to give new entries
    pending: list[PendingLogprobs]
    pooled: PooledStep


class ModelRunner:
    """The steps of one model. Must be used on the thread that made the model."""

    def __init__(
        self,
        batch: BatchRunner,
        backbone_and_head: BackboneAndHead,
        model_info: ModelInfo,
        tokenizer: Tokenizer,
        chat: ChatCodec,
        adapters: AdapterHost | None = None,
        draft: DraftModel | PredictionHead | None = None,
        prefix_store: PrefixStore | None = None,
        prompt_scorer: PromptScorer | None = None,
        has_background: bool = False,
    ) -> None:
        """Start without sequences. Without `adapters`, none can be loaded. `draft` proposes tokens.

        `has_background` says that two threads may call the model; see background.py.
        """
        self.model_info = model_info
        self.tokenizer = tokenizer
        self.chat = chat
        self.can_share = batch.can_share
        self.can_speculate = batch.can_speculate
        self._adapters = adapters
        self.draft = draft
        if isinstance(draft, PredictionHead):
            batch.on_prompt = draft.observe_prompt
        self.prefix_store = prefix_store
        self.prompt_scorer = prompt_scorer
        self.batch = batch
        self._has_background = has_background
        self._head = backbone_and_head
        # Exact mode has one way only: a row's numbers must not depend on what others ask for.
        uses_host = cpu_kernels.are_used() and model_info.mode != "exact"
        self._on_host = OnHost(cpu_logprobs.normalize, cpu_logprobs.top_k) if uses_host else None
        self._launch_waits = launch_waits()
        self._token_ids = mx.array([], dtype=mx.int32)  # of all rows of the last launch
        self._sampled_rows: dict[Sequence, int] = {}  # rows of `_token_ids` that hold sampled tokens
        self._paused_rows: dict[Sequence, mx.array] = {}  # [1, width]: hidden states of sequences that are paused

    def launch(self, output: SchedulerOutput) -> tuple[LaunchedStep, list[Sequence]]:
        """Start one step and return before it is computed. Pause sequences whose constraints are late."""
        queries: list[LogprobQuery] = []
        hidden: list[mx.array] = []
        slices: dict[Sequence, Slice] = {}
        embedded: list[tuple[Slice, int]] = []
        num_rows = 0
        for forward in output.forwards:
            if forward[0].is_decode:
                hidden.append(self.batch.decode(forward, self._last_ids(forward)))
            elif forward[0].resumes:
                hidden += self._resume([slice_.sequence for slice_ in forward])
            else:
                hidden.append(self.batch.prefill(forward))
            for slice_ in forward:
                if not (predictors := slice_.predictors):
                    continue
                if slice_.sequence.pooling is not None:
                    embedded.append((slice_, num_rows))
                else:
                    slices[slice_.sequence] = slice_
                    queries.append(self._query(slice_, predictors))
                num_rows += len(predictors)
        pooled, rows = pooling.pool(embedded, mx.concatenate(hidden), self.model_info.mode == "exact")
        logits: mx.array | None = None
        late: list[Sequence] = []
        if any(query.sequence.constraint is not None for query in queries):
            # The device computes while others find what may follow. Before the launch the last tokens may have to be
            # waited for, with nothing for a GPU to do; after it, the device of a launch that waits has nothing to do.
            logits = self._logits(rows) if self._fits_one_head(rows) else None
            in_flight = rows if logits is None else logits
            if not self._launch_waits:
                mx.async_eval(in_flight)
            asked = ask_constraints(queries)
            if self._launch_waits:
                mx.async_eval(in_flight)
            late = find_late(asked, partial(mx.eval, in_flight))
        if late:
            queries, kept = self._pause(late, queries, rows)
            rows, logits = rows[kept], None if logits is None else logits[kept]
        if isinstance(self.draft, PredictionHead):
            self.draft.observe(queries, rows)
        pending = self._compute(queries, rows, logits)
        self._remember_sampled_rows(pending)
        return LaunchedStep(slices, pending, pooled), late

    @property
    def has_background(self) -> bool:
        """True if two threads may call the model. Layers with adapters are told from outside which rows have which."""
        return self._has_background and not self.adapter_bytes

    def launch_background(self, forwards: list[list[Slice]]) -> "background.Job[LaunchedStep]":
        """Start forward passes of prompts that are only scored, on another thread; see background.py."""
        return background.Job(partial(self._score, forwards))

    def _score(self, forwards: list[list[Slice]]) -> LaunchedStep:
        """Compute forward passes and what is reported of their tokens, with one thread a product of matrices."""
        step = LaunchedStep({}, [], PooledStep([], []))
        with one_thread_a_product():
            for forward in forwards:
                slices = [slice_ for slice_ in forward if slice_.predictors]
                step.slices.update((slice_.sequence, slice_) for slice_ in slices)
                queries = [self._query(slice_, slice_.predictors) for slice_ in slices]
                step.pending.extend(self._compute(queries, self.batch.prefill(forward)))
            for pending in step.pending:
                pending.wait()
        return step

    def read(self, step: LaunchedStep) -> list[SliceResult]:
        """Wait for a step and append to the columns. An error marks a sequence whose logits are no distribution."""
        results: dict[Sequence, SliceResult] = {}
        for pending in step.pending:
            for found in pending.read():
                sequence = found.query.sequence
                if sequence not in results:
                    if sequence.finish_reason is not None:  # in an earlier step
                        continue
                    results[sequence] = _result_of(step.slices[sequence])
                result = results[sequence]
                result.proposed_logprobs += found.proposed_logprobs
                if result.error is None and not result.is_complete and sequence.finish_reason is None:
                    self._append(found, result)
        if any(slice_.proposed_ids for slice_ in step.slices.values()):
            going_on = [one for one in results.values() if one.slice.sequence.finish_reason is None]
            self.batch.drop_rejected({one.slice.sequence: one.num_rejected for one in going_on})
        return list(results.values()) + pooling.read(step.pooled)

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens after the token at `position` a step can verify."""
        able = self.batch.max_proposed(position)
        return able if self.draft is None else min(able, self.draft.max_proposed(position))

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""
        self.batch.release(sequences)
        for sequence in sequences:
            self._paused_rows.pop(sequence, None)

    @property
    def adapter_bytes(self) -> int:
        """The memory that the loaded adapters take."""
        return 0 if self._adapters is None else self._adapters.num_bytes

    def load_adapter(self, name: str, folder: str, max_bytes: int) -> Adapter:
        """Load an adapter beside the others, which take at most `max_bytes` together. Raises AdapterError."""
        if self._adapters is None:
            raise AdapterError("this model takes no adapters")
        return self._adapters.load(name, folder, max_bytes)

    def drop_adapters(self, adapters: list[Adapter]) -> None:
        """Drop adapters that no sequence has."""
        if self._adapters is not None:
            self._adapters.drop(adapters)

    def take_over_adapters(self, closed: "ModelRunner") -> None:
        """Take the adapters of a closed runner of the same model."""
        if self._adapters is not None and closed._adapters is not None:
            self._adapters.take_over(closed._adapters)

    def close(self) -> None:
        """Drop the weights and all caches, for good. What describes the model stays."""
        if self._adapters is not None:
            self._adapters.close()
        if isinstance(self.batch, LeadingBatch):
            self.batch.close()
        del self.batch, self._head, self._token_ids
        self.prompt_scorer = None
        if self.draft is not None:
            self.draft.close()
        if self.prefix_store is not None:
            self.prefix_store.close()
        self._sampled_rows.clear()
        self._paused_rows.clear()
        garbage.collect()
        memory_budget.return_free_memory()

    def _pause(
        self, late: list[Sequence], queries: list[LogprobQuery], rows: mx.array
    ) -> tuple[list[LogprobQuery], mx.array]:
        """Keep the hidden states from which sequences will sample. Return the other queries, and their rows."""
        kept_queries: list[LogprobQuery] = []
        kept_rows: list[int] = []
        start = 0
        for query in queries:
            stop = start + len(query.positions)
            if query.sequence in late:
                first = stop - len(query.sampled_positions)  # those after it follow proposed tokens, which are dropped
                self._paused_rows[query.sequence] = mx.contiguous(rows[first : first + 1])
                query = replace(query, positions=query.positions[: first - start])  # given tokens are reported now
            if query.positions:
                kept_queries.append(query)
                kept_rows += range(start, start + len(query.positions))
            start = stop
        self.batch.pause(late)
        mx.async_eval([self._paused_rows[sequence] for sequence in late])
        return kept_queries, mx.array(kept_rows, dtype=mx.int32)

    def _resume(self, sequences: list[Sequence]) -> list[mx.array]:
        """Let paused sequences decode again; return the hidden states from which they sample now."""
        self.batch.resume(sequences)
        return [self._paused_rows.pop(sequence) for sequence in sequences]

    def _query(self, slice_: Slice, predictors: range) -> LogprobQuery:
        """Make the query for what the predictors predict."""
        sequence, positions = slice_.sequence, range(predictors.start + 1, predictors.stop + 1)
        query = LogprobQuery(sequence, positions)
        if query.samples:
            query.eos_ids = self.tokenizer.eos_ids
        if slice_.proposed_ids:
            query.proposed, query.proposed_from = slice_.proposed_ids, slice_.start + 1
        elif sequence.needs_logits_processing and len(sequence.token_ids) < predictors.stop:
            query.unread = UnreadToken(self._token_ids, self._sampled_rows[sequence])
        return query

    def _last_ids(self, slices: list[Slice]) -> mx.array:
        """Return [rows]: the tokens that the last launch samples, whether the host has read them or not."""
        if all(len(slice_.sequence.token_ids) > slice_.start for slice_ in slices):
            return mx.array([slice_.sequence.token_ids[slice_.start] for slice_ in slices], dtype=mx.int32)
        index = [self._sampled_rows[slice_.sequence] for slice_ in slices]
        is_all = index == list(range(self._token_ids.shape[0]))  # nothing was prefilled, and no sequence left
        return self._token_ids if is_all else self._token_ids[mx.array(index)]

    def _remember_sampled_rows(self, pending: list[PendingLogprobs]) -> None:
        """Remember where the next step finds the sampled tokens."""
        self._sampled_rows = {}
        num_rows = 0
        for chunk in pending:
            for query in chunk.queries:
                num_rows += len(query.positions)
                if query.samples:
                    self._sampled_rows[query.sequence] = num_rows - 1
        token_ids = [chunk.token_ids for chunk in pending]
        self._token_ids = mx.concatenate(token_ids) if token_ids else mx.array([], dtype=mx.int32)
        mx.async_eval(self._token_ids)

    def _compute(
        self, queries: list[LogprobQuery], rows: mx.array, logits: mx.array | None = None
    ) -> list[PendingLogprobs]:
        """Launch heads and logprobs in chunks of rows, each awaited before the next. `logits` are those of all rows.

        No more than LOGITS_BYTES of logits exist at a time.
        """
        if logits is not None:
            return [compute_logprobs(queries, logits, self._on_host)] if queries else []
        pending: list[PendingLogprobs] = []
        if self.model_info.mode == "exact":
            for head in assign_heads(queries):
                _await_last(pending)
                pending.append(compute_logprobs(head.queries, self._exact_logits(rows, head.rows)))
            return pending
        max_rows = rows_at_once(self.model_info.vocab_size, rows.dtype.size)
        for number, chunk in enumerate(split_rows(queries, max_rows)):
            _await_last(pending)
            start = number * max_rows
            pending.append(compute_logprobs(chunk, self._logits(rows[start : start + max_rows]), self._on_host))
        return pending

    def _fits_one_head(self, rows: mx.array) -> bool:
        """True if the logits of these rows are computed at once."""
        fits = 0 < rows.shape[0] <= rows_at_once(self.model_info.vocab_size, rows.dtype.size)
        return fits and self.model_info.mode != "exact"

    def _exact_logits(self, rows: mx.array, row_of_slot: dict[int, int]) -> mx.array:
        """Run a head of EXACT_ROWS rows: those in their slots, anything in the other slots."""
        index = [row_of_slot.get(slot, 0) for slot in range(EXACT_ROWS)]
        return self._logits(rows[mx.array(index)])[mx.array(list(row_of_slot))]

    def _logits(self, rows: mx.array) -> mx.array:
        return self._head.compute_logits(rows).astype(mx.float32)

    def _append(self, found: TokenLogprobs, result: SliceResult) -> None:
        """Append values to the sequence's columns, and sampled tokens to its tokens, up to the first not proposed."""
        sequence = found.query.sequence
        for part in found.split():
            if part.non_finite_position is not None:
                result.error = NonFiniteLogits(
                    f"the model's logits for the token at position {part.non_finite_position} are not finite, "
                    "so no logprob exists; another dtype may help"
                )
                return
            sequence.columns.extend(part.columns)
            for token_id in part.sampled_ids:
                sequence.token_ids.append(token_id)
                check_stop(sequence, self.tokenizer.token_bytes, self.tokenizer.eos_ids)
                if not result.accept(token_id) or sequence.finish_reason is not None:
                    return


def _result_of(slice_: Slice) -> SliceResult:
    """Make the result of a slice, none of whose proposed tokens is accepted yet."""
    result = SliceResult(slice_, slice_.num_tokens - len(slice_.proposed_ids))
    if slice_.proposed_ids and slice_.sequence.constraint is not None:
        result.num_acceptable = slice_.sequence.constraint.num_foreseen
    return result


def _await_last(pending: list[PendingLogprobs]) -> None:
    if pending:
        pending[-1].wait()


def launch_waits() -> bool:
    """True if a launch returns when nearly all is computed: MLX's queue of tasks for a CPU is short."""
    return mx.default_device() == mx.cpu


def rows_at_once(vocab_size: int, item_size: int) -> int:
    """Count the rows of logits that fit into LOGITS_BYTES, with the float32 copy that logprobs are computed from."""
    return max(1, LOGITS_BYTES // (vocab_size * (item_size + 4)))


@dataclass(slots=True)
class ExactHead:
    """One head of exact mode: queries, and which hidden row stands in which of the EXACT_ROWS slots."""

    queries: list[LogprobQuery]
    rows: dict[int, int]  # by slot, in the order of the queries' positions

    def add(self, query: LogprobQuery, position: int, row: int) -> None:
        """Append one position of a query."""
        self.rows[position % EXACT_ROWS] = row
        if self.queries and self.queries[-1].sequence is query.sequence:
            self.queries[-1].positions = range(self.queries[-1].positions.start, position + 1)
        else:
            self.queries.append(replace(query, positions=range(position, position + 1)))


def assign_heads(queries: list[LogprobQuery]) -> list[ExactHead]:
    """Distribute the rows of all queries over the heads of exact mode.

    A row's rounding may depend on its place in the block that a kernel is given, so the slot of a token follows from
    its position alone. The positions of a sequence keep their order over the heads.
    """
    heads: list[ExactHead] = []
    last_head: dict[Sequence, int] = {}  # that a sequence has come to
    free_head: dict[int, int] = {}  # the first head after those where a slot is taken
    row = 0
    for query in queries:
        for position in query.positions:
            slot = position % EXACT_ROWS
            number = max(last_head.get(query.sequence, 0), free_head.get(slot, 0))
            if number == len(heads):
                heads.append(ExactHead([], {}))
            heads[number].add(query, position, row)
            last_head[query.sequence], free_head[slot] = number, number + 1
            row += 1
    return heads
