"""Test whether a model's batched path is right. Runs once, when the model is loaded, on a few tokens.

mlx-lm's caches are wrong for some architectures in a padded batch (gemma2 raises, mamba v1 is off by nats), silently
for some. Every way in which the engine runs a sequence is compared with the plainest one: the whole sequence through
the model, alone, without a cache and without a tap.

The trial rows of a few tokens do not cross a sliding window. A longer row runs too if a forward pass of the window's
length is quick, as it is on a GPU and for small windows; otherwise `window_row` returns None and the outcome says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx

from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sampling, Sequence

# Mean over the vocabulary of |difference of logprobs|, at the worst position. Right models differ by rounding alone,
# 1e-6 in float32; the wrong ones known differ by 1e-2 and more.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
SHARING = "a prompt that sequences share"
_PROMPT_LENGTHS = (13, 7, 4)  # tokens
_NUM_DECODED = 3
_TOKENS_BEYOND_WINDOW = 6  # in the window row
_MAX_WINDOW_S = 0.6  # for one forward pass of the window's length; the test runs three


def trial_rows(vocab_size: int) -> list[list[int]]:
    """Draw the token ids of the trial rows."""
    draw = Random(0)  # noqa: S311
    return [[draw.randrange(vocab_size) for _ in range(length + _NUM_DECODED)] for length in _PROMPT_LENGTHS]


def window_row(window: int, vocab_size: int, seconds: float) -> list[int] | None:
    """Draw a row that crosses the window; None if it would be slow, given that the trial rows took `seconds`."""
    num_trial_tokens = sum(_PROMPT_LENGTHS) + len(_PROMPT_LENGTHS) * _NUM_DECODED
    if seconds * window / num_trial_tokens > _MAX_WINDOW_S:
        return None
    draw = Random(1)  # noqa: S311
    return [draw.randrange(vocab_size) for _ in range(window + _TOKENS_BEYOND_WINDOW)]


def reference_logprobs(model: Any, rows: list[list[int]]) -> list[mx.array]:
    """Compute [length, vocab] logprobs of each row by the model alone."""
    return [_log_softmax(model(mx.array([row]))[0]) for row in rows]


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A check of the self-test that a batch fails, and how."""

    name: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}"


def find_fault(
    batch: BatchRunner,
    backbone_and_head: BackboneAndHead,
    reference: list[mx.array],
    rows: list[list[int]],
    longest: list[int] | None = None,
) -> FailedCheck | None:
    """Return the first check that this batch fails; None if it passes all. The batch is left empty unless it raised.

    rows       token ids: prompts as long as _PROMPT_LENGTHS says, and the tokens to decode after them
    reference  [length, vocab] float32 logprobs of each of `rows`
    longest    token ids of a row that is longer than the sliding window
    """
    trial = _Trial(batch, backbone_and_head, reference, rows)
    checks: dict[str, Callable[[], float]] = {
        "a padded batch without caches": trial.score,
        "a batch that generates": trial.generate,
        "a prompt in chunks": trial.prefill_in_chunks,
    }
    if longest is not None:
        checks["a row longer than the sliding window"] = lambda: trial.cross_window(longest)
    if batch.can_share:
        checks[SHARING] = trial.share_prefixes
    tolerance = _TOLERANCE[backbone_and_head.forward_hidden(mx.array([[0]])).dtype]
    for name, check in checks.items():
        try:
            difference = check()
        except Exception as error:  # any: the architecture's own code is tested here
            return FailedCheck(name, f"raises {type(error).__name__}: {error}")
        if not difference <= tolerance:  # NaN is a fault
            return FailedCheck(name, f"is off by {difference:.2g} nats")
    return None


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
        rows = zip(self.reference, self.rows, strict=True)
        return self._difference(hidden, [logprobs[t] for logprobs, row in rows for t in range(len(row) - 1)])

    def generate(self) -> float:
        """Decode two rows, let a third join after a scored row, let the first leave."""
        first, second, third = sequences = [_generating(row) for row in self.rows]
        scored = Sequence(token_ids=self.rows[0], score_from=1)
        number_of = {sequence: number for number, sequence in enumerate(sequences)}

        def decode(*decoding: Sequence) -> float:
            for sequence in decoding:
                sequence.token_ids.append(self.rows[number_of[sequence]][len(sequence.token_ids)])
            hidden = self._decode(list(decoding))
            return self._difference(
                hidden, [self.reference[number_of[sequence]][len(sequence.token_ids) - 1] for sequence in decoding]
            )

        self.batch.prefill([Slice.prefill(first), Slice.prefill(second)])
        differences = [decode(first, second)]
        hidden = mx.concatenate([self.batch.prefill([Slice.prefill(sequence)]) for sequence in (third, scored)])
        expected = [self.reference[2][third.num_input_tokens - 1]]
        expected += [self.reference[0][t] for t in range(scored.num_prefill)]
        differences.append(self._difference(hidden, expected))
        differences.append(decode(first, second, third))
        self.batch.release([first])
        differences.append(decode(second, third))
        self.batch.release([second, third])
        return max(differences)

    def prefill_in_chunks(self) -> float:
        """Score a row in two chunks."""
        sequence = Sequence(token_ids=self.rows[0], score_from=1)
        hidden = self._prefill_in_two(sequence)
        return self._difference(hidden, [self.reference[0][t] for t in range(sequence.num_prefill)])

    def cross_window(self, row: list[int]) -> float:
        """Score the last tokens of a row in two chunks, and generate them beside a short row."""
        hidden = self.backbone_and_head.forward_hidden(mx.array([row]))[0, -_NUM_DECODED - 1 :]
        expected = list(_log_softmax(self.backbone_and_head.compute_logits(hidden)))
        hidden = self._prefill_in_two(Sequence(token_ids=row, score_from=len(row) - _NUM_DECODED))
        differences = [self._difference(hidden, expected[:-1])]

        decoding = [_generating(row), _generating(row[:7])]
        hidden = self.batch.prefill([Slice.prefill(sequence) for sequence in decoding])
        differences.append(self._difference(hidden[:1], expected[:1]))
        for index, token_id in enumerate(row[-_NUM_DECODED:], 1):
            for sequence in decoding:
                sequence.token_ids.append(token_id)
            hidden = self._decode(decoding)
            differences.append(self._difference(hidden[:1], expected[index : index + 1]))
        self.batch.release(decoding)
        return max(differences)

    def share_prefixes(self) -> float:
        """Run two rows on one prefix, then one of them beside a row on a shorter prefix, then one that generates."""
        longer, shorter = self._compute_prefix(self.rows[0][:8]), self._compute_prefix(self.rows[1][:5])
        whole = Sequence(token_ids=self.rows[0], score_from=longer.length)
        truncated = Sequence(token_ids=self.rows[0][:-2], score_from=longer.length)
        other = Sequence(token_ids=self.rows[1], score_from=shorter.length)
        generating = _generating(self.rows[0])

        def run(*slices: Slice) -> float:
            expected = [
                self.reference[0 if slice_.cached_prefix is longer else 1][position]
                for slice_ in slices
                for position in slice_.predictors
            ]
            return self._difference(self.batch.prefill(list(slices)), expected)

        differences = [
            run(Slice.prefill(whole, longer), Slice.prefill(truncated, longer)),
            run(Slice.prefill(whole, longer), Slice.prefill(other, shorter)),
            run(Slice.prefill(generating, longer)),
        ]
        self.batch.release([generating])
        return max(differences)

    def _decode(self, sequences: list[Sequence]) -> mx.array:
        """Decode the last token of each sequence."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        slices = [Slice(sequence, length - 1, length) for sequence, length in zip(sequences, lengths, strict=True)]
        return self.batch.decode(slices, mx.array([sequence.token_ids[-1] for sequence in sequences]))

    def _prefill_in_two(self, sequence: Sequence) -> mx.array:
        middle = sequence.num_prefill // 2
        chunks = Slice(sequence, 0, middle), Slice(sequence, middle, sequence.num_prefill)
        return mx.concatenate([self.batch.prefill([chunk]) for chunk in chunks])

    def _compute_prefix(self, token_ids: list[int]) -> Prefix:
        prefix = Prefix(Prefix(None, []), token_ids)
        self.batch.prefill([Slice(Sequence(token_ids=token_ids), 0, len(token_ids), fills_prefix=prefix)])
        return prefix

    def _difference(self, hidden: mx.array, expected: list[mx.array]) -> float:
        """Compare hidden [n, width] with n rows of logprobs [vocab]."""
        found, right = _log_softmax(self.backbone_and_head.compute_logits(hidden)), mx.stack(expected)
        distance = mx.where(found == right, 0, mx.abs(found - right))  # -inf of an excluded token equals -inf
        worst: float = distance.mean(axis=-1).max().item()  # type: ignore[assignment]
        return worst


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _generating(row: list[int]) -> Sequence:
    """Make a sequence that generates the last tokens of a row."""
    return Sequence(token_ids=row[:-_NUM_DECODED], sampling=Sampling(max_tokens=_NUM_DECODED))
