"""Test whether a model's batched path is right. Runs once, when the model is loaded, on a few tokens.

mlx-lm's caches are wrong for some architectures in a padded batch (gemma2 raises, mamba v1 is off by nats), silently
for some. Every way in which the engine runs a sequence is compared with the plainest one: the whole sequence through
the model, alone and without a cache.

The trial rows of a few tokens do not cross a sliding window. A longer row runs too if a forward pass of the window's
length is quick, as it is on a GPU and for small windows; otherwise the outcome says that it did not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import mlx.core as mx

from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sampling, Sequence

# Mean over the vocabulary of |difference of logprobs|, at the worst position. Right models differ by rounding alone,
# 1e-5 in float32 on a CPU; the wrong ones known differ by 3e-4 and more. A GPU may multiply float32 in fewer bits.
_TOLERANCE = {mx.float32: 1e-4 if mx.default_device() == mx.cpu else 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
_NUM_COMPARED = 3  # positions whose logprobs are compared: those with the least equal hidden states
_CONSTANT = 1e-2  # nats; logprobs that differ by less everywhere say nothing
SPECULATION = "a batch that verifies proposed tokens"
SHARING = "a prompt that sequences share"
_PROMPT_LENGTHS = (13, 7, 4)  # tokens
_NUM_DECODED = 3
_TOKENS_BEYOND_LIMIT = 6  # tokens of a long row after its limit
_MAX_WINDOW_S = 0.6  # for one forward pass of the window's length; the test runs three


def trial_rows(vocab_size: int) -> list[list[int]]:
    """Draw the token ids of the trial rows."""
    draw = Random(0)  # noqa: S311
    return [[draw.randrange(vocab_size) for _ in range(length + _NUM_DECODED)] for length in _PROMPT_LENGTHS]


def is_quick(num_tokens: int, seconds: float) -> bool:
    """True if rows of this length can be tested, given that the trial rows took `seconds`."""
    num_trial_tokens = sum(_PROMPT_LENGTHS) + len(_PROMPT_LENGTHS) * _NUM_DECODED
    return seconds * num_tokens / num_trial_tokens <= _MAX_WINDOW_S


def _long_row(limit: int, vocab_size: int, context_length: int) -> list[int]:
    """Draw a row that is longer than `limit`."""
    draw = Random(1)  # noqa: S311
    return [draw.randrange(vocab_size) for _ in range(min(limit + _TOKENS_BEYOND_LIMIT, context_length))]


def find_degeneracy(logits: mx.array) -> str | None:
    """Name what no trained model computes, or return None. `logits` [length, vocab] of a trial row."""
    logprobs = _log_softmax(logits)
    if not mx.isfinite(mx.logsumexp(logprobs, axis=-1)).all().item():
        return "the model's logits for a few test tokens are not finite; another dtype may help"
    highest = logprobs.max(axis=-1)
    lowest = mx.where(mx.isinf(logprobs), mx.inf, logprobs).min(axis=-1)  # -inf: a token that the model excludes
    if (highest - lowest <= _CONSTANT).all().item():
        return "the model's logits are constant: every token has the same logprob"
    same = mx.where(logprobs == logprobs[0], 0, mx.abs(logprobs - logprobs[0]))
    if (same.max() <= _CONSTANT).item():
        return "the model's logits do not depend on the tokens: every text has the same next token"
    return None


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A check of the self-test that a batch fails, and how."""

    name: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}"


class SelfTest:
    """The trial rows of one model, and what is right for them.

    outcome   what to say of a batch without a fault
    """

    def __init__(
        self,
        backbone_and_head: BackboneAndHead,
        vocab_size: int,
        context_length: int,
        *,
        window: int | None = None,
        tile: int | None = None,
        speculates: bool = False,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Compute the trial rows alone, without a cache.

        window  the shortest sliding window, in tokens
        tile    tokens of a forward pass of BatchInvariant
        speculates  the batch will verify proposed tokens
        all_agree  true if an answer that depends on the clock is true on every rank: all make the same forward passes
        """
        self._backbone_and_head = backbone_and_head
        self._rows = trial_rows(vocab_size)
        self._speculates = speculates
        self._long_rows: dict[str, list[int]] = {}  # by what they are longer than
        self.outcome = "passed"
        self._reference, seconds = self._compute_reference()
        if tile and tile < context_length:
            self._long_rows["a tile"] = _long_row(tile, vocab_size, context_length)
        if window is None or window >= context_length:
            return  # no row crosses it
        if not all_agree(is_quick(window, seconds)):
            seconds = self._compute_reference()[1]  # the first forward is slower, and the machine may have stalled
        if all_agree(is_quick(window, seconds)):
            self._long_rows["the sliding window"] = _long_row(window, vocab_size, context_length)
        else:
            self.outcome = f"passed; too slow to test beyond its window of {window} tokens"

    def find_fault(self, batch: BatchRunner, backbone_and_head: BackboneAndHead | None = None) -> FailedCheck | None:
        """Return the first check that this batch fails, or None. The batch is left empty unless it raised."""
        trial = _Trial(batch, backbone_and_head or self._backbone_and_head, self._reference, self._rows)
        checks: dict[str, Callable[[], float]] = {
            "a padded batch without caches": trial.score,
            "a batch that generates": trial.generate,
            "a prompt in chunks": trial.prefill_in_chunks,
        }
        if self._speculates and batch.can_speculate:
            checks[SPECULATION] = partial(trial.verify_proposals, list(self._long_rows.values()))
        for limit, row in self._long_rows.items():
            checks[f"a row longer than {limit}"] = partial(trial.run_long, row)
        if batch.can_share:
            checks[SHARING] = trial.share_prefixes
        tolerance = _TOLERANCE[self._reference[0].dtype]
        for name, check in checks.items():
            try:
                difference = check()
            except Exception as error:  # any: it is the architecture's code, on trial
                return FailedCheck(name, f"raises {type(error).__name__}: {error}")
            if not difference <= tolerance:  # NaN is a fault
                return FailedCheck(name, f"is off by {difference:.2g} nats")
        return None

    def _compute_reference(self) -> tuple[list[mx.array], float]:
        """Return [length, width] hidden states of each trial row, and the seconds that they took."""
        started = time.perf_counter()
        hidden = [self._backbone_and_head.forward_hidden(mx.array([row]))[0] for row in self._rows]
        mx.eval(hidden)
        return hidden, time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Trial:
    """Ways to run the trial rows. Each returns how far the logprobs are from the reference, at the worst position."""

    batch: BatchRunner
    backbone_and_head: BackboneAndHead
    reference: list[mx.array]
    rows: list[list[int]]

    def score(self) -> float:
        """Score all rows in one padded batch."""
        sequences = [Sequence(token_ids=row, score_from=0) for row in self.rows]
        hidden = self.batch.prefill([Slice.prefill(sequence) for sequence in sequences])
        return self._difference([hidden], [right[:-1] for right in self.reference])

    def generate(self) -> float:
        """Decode two rows, let a third join after a scored row, let the first leave."""
        first, second, third = sequences = [_generating(row) for row in self.rows]
        scored = Sequence(token_ids=self.rows[0], score_from=1)
        number_of = {sequence: number for number, sequence in enumerate(sequences)}
        hidden: list[mx.array] = []
        expected: list[mx.array] = []

        def decode(*decoding: Sequence) -> None:
            for sequence in decoding:
                sequence.token_ids.append(self.rows[number_of[sequence]][len(sequence.token_ids)])
                expected.append(self.reference[number_of[sequence]][len(sequence.token_ids) - 1][None])
            hidden.append(self._decode(list(decoding)))

        self.batch.prefill([Slice.prefill(first), Slice.prefill(second)])
        decode(first, second)
        hidden += [self.batch.prefill([Slice.prefill(sequence)]) for sequence in (third, scored)]
        expected += [self.reference[2][third.num_input_tokens - 1][None], self.reference[0][:-1]]
        decode(first, second, third)
        self.batch.release([first])
        decode(second, third)
        self.batch.release([second, third])
        return self._difference(hidden, expected)

    def verify_proposals(self, long_rows: list[list[int]]) -> float:
        """Decode rows with right and wrong proposed tokens, in three steps: the trial rows, then each long row."""
        worst = 0.0
        for rows, num_right, num_wrong in (
            (self.rows, [[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0]]),
            *(([row, self.rows[1]], [[1, 0], [0, 1]], [[1, 2], [0, 0]]) for row in long_rows),
        ):
            sequences = [_generating(row) for row in rows]
            self.batch.prefill([Slice.prefill(sequence) for sequence in sequences])
            reference = [self.backbone_and_head.forward_hidden(mx.array([row]))[0] for row in rows]
            steps = [
                self._verify(dict(zip(sequences, rows, strict=True)), reference, right, wrong)
                for right, wrong in zip(num_right, num_wrong, strict=True)
            ]
            self.batch.release(sequences)
            difference = self._difference([found for found, _ in steps], [one for _, right in steps for one in right])
            worst = max(worst, difference) if difference == difference else difference  # NaN is a fault
        return worst

    def _verify(
        self, rows: dict[Sequence, list[int]], reference: list[mx.array], num_right: list[int], num_wrong: list[int]
    ) -> tuple[mx.array, list[mx.array]]:
        """Decode rows with proposed tokens. Return the hidden states of those that are right, and their reference."""
        slices: list[Slice] = []
        expected: list[mx.array] = []
        kept: list[int] = []
        num_states = 0
        sequences = list(rows)
        for number, (sequence, right, wrong) in enumerate(zip(sequences, num_right, num_wrong, strict=True)):
            row, start = rows[sequence], len(sequence.token_ids)
            end = start + 1 + right
            wrong_ids = [0 if row[end] else 1] * wrong if wrong else []
            slices.append(Slice(sequence, start, end + wrong, proposed_ids=(*row[start + 1 : end], *wrong_ids)))
            sequence.token_ids.append(row[start])
            expected.append(reference[number][start:end])
            kept += range(num_states, num_states + 1 + right)
            num_states += 1 + right + wrong
        found = self.batch.decode(slices, mx.array([sequence.token_ids[-1] for sequence in sequences]))
        self.batch.drop_rejected(dict(zip(sequences, num_wrong, strict=True)))
        for sequence, slice_, right in zip(sequences, slices, num_right, strict=True):
            sequence.token_ids += slice_.proposed_ids[:right]
        return found[mx.array(kept)], expected

    def prefill_in_chunks(self) -> float:
        """Score a row in two chunks."""
        sequence = Sequence(token_ids=self.rows[0], score_from=1)
        return self._difference(self._prefill_in_two(sequence), [self.reference[0][:-1]])

    def run_long(self, row: list[int]) -> float:
        """Score the last tokens of a row in two chunks, and generate them beside a short row."""
        right = self.backbone_and_head.forward_hidden(mx.array([row]))[0, -_NUM_DECODED - 1 :]
        hidden = self._prefill_in_two(Sequence(token_ids=row, score_from=len(row) - _NUM_DECODED))
        decoding = [_generating(row), _generating(row[:7])]
        hidden.append(self.batch.prefill([Slice.prefill(sequence) for sequence in decoding])[:1])
        for token_id in row[-_NUM_DECODED:]:
            for sequence in decoding:
                sequence.token_ids.append(token_id)
            hidden.append(self._decode(decoding)[:1])
        self.batch.release(decoding)
        return self._difference(hidden, [right[:-1], right])

    def share_prefixes(self) -> float:
        """Run two rows on one prefix, then one of them beside a row on a shorter prefix, then one that generates."""
        longer, shorter = self._compute_prefix(self.rows[0][:8]), self._compute_prefix(self.rows[1][:5])
        whole = Sequence(token_ids=self.rows[0], score_from=longer.length)
        truncated = Sequence(token_ids=self.rows[0][:-2], score_from=longer.length)
        other = Sequence(token_ids=self.rows[1], score_from=shorter.length)
        generating = _generating(self.rows[0])
        forwards = [
            [Slice.prefill(whole, longer), Slice.prefill(truncated, longer)],
            [Slice.prefill(whole, longer), Slice.prefill(other, shorter)],
            [Slice.prefill(generating, longer)],
        ]
        hidden = [self.batch.prefill(forward) for forward in forwards]
        self.batch.release([generating])
        slices = [slice_ for forward in forwards for slice_ in forward]
        number_of = {longer: 0, shorter: 1}
        predictors = [(number_of[slice_.cached_prefix], slice_.predictors) for slice_ in slices if slice_.cached_prefix]
        return self._difference(hidden, [self.reference[number][p.start : p.stop] for number, p in predictors])

    def _decode(self, sequences: list[Sequence]) -> mx.array:
        """Decode the last token of each sequence."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        slices = [Slice(sequence, length - 1, length) for sequence, length in zip(sequences, lengths, strict=True)]
        return self.batch.decode(slices, mx.array([sequence.token_ids[-1] for sequence in sequences]))

    def _prefill_in_two(self, sequence: Sequence) -> list[mx.array]:
        middle = sequence.num_prefill // 2
        chunks = Slice(sequence, 0, middle), Slice(sequence, middle, sequence.num_prefill)
        return [self.batch.prefill([chunk]) for chunk in chunks]

    def _compute_prefix(self, token_ids: list[int]) -> Prefix:
        prefix = Prefix(Prefix(None, []), token_ids)
        self.batch.prefill([Slice(Sequence(token_ids=token_ids), 0, len(token_ids), fills_prefix=prefix)])
        return prefix

    def _difference(self, hidden: list[mx.array], expected: list[mx.array]) -> float:
        """Compare hidden states [n, width], each in parts: in nats, at the positions where they are the least equal."""
        found, right = mx.concatenate(hidden), mx.concatenate(expected)
        error = mx.where(found == right, 0, found.astype(mx.float32) - right)
        distance = mx.linalg.norm(error, axis=-1) / mx.linalg.norm(mx.where(mx.isinf(right), 0, right), axis=-1)
        worst = mx.argsort(-mx.where(mx.isnan(distance), mx.inf, distance))[:_NUM_COMPARED]
        logits = self.backbone_and_head.compute_logits(mx.concatenate([found[worst], right[worst]]))
        one, other = _log_softmax(logits).split(2)
        nats = mx.where(one == other, 0, mx.abs(one - other))  # -inf of an excluded token equals -inf
        largest: float = nats.mean(axis=-1).max().item()  # type: ignore[assignment]
        return largest


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _generating(row: list[int]) -> Sequence:
    """Make a sequence that generates the last tokens of a row."""
    return Sequence(token_ids=row[:-_NUM_DECODED], sampling=Sampling(max_tokens=_NUM_DECODED))
