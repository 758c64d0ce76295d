"""Is this model's batched path right? Asked once, when the model is loaded, by running it on a few tokens.

mlx-lm's caches go wrong for some architectures in a padded batch (gemma2 raises, mamba v1 is off by nats),
silently for some. Every way that the engine runs a row is compared with the plainest one: the whole row
through the model, alone, without a cache and without a tap.

Rows of a few tokens cross no sliding window. A longer one is run too where a forward of the window's length is
quick, which it is on a GPU and for small windows; otherwise `window_row` gives none, and the outcome says so.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import mlx.core as mx

from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.scheduler import Chunk
from scorepool.engine.sequence import Sampling, Sequence

# Mean over the vocabulary of |difference of logprobs|, at the worst position. Right models differ by
# rounding alone, 1e-6 in float32; the wrong ones known differ by 1e-2 and more.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
SHARING = "a prompt that rows share"
_GIVEN = (13, 7, 4)  # tokens of the prompts
_NUM_DECODED = 3
_BEYOND = 6  # tokens of the longest row behind the sliding window
_MOST_WINDOW_S = 0.6  # of one forward of the window's length, of which there are three


def find_fault(
    batch: BatchRunner,
    halves: BackboneAndHead,
    reference: list[mx.array],
    rows: list[list[int]],
    longest: list[int] | None = None,
) -> str | None:
    """What this batch does wrong, or None. It is given back empty unless it raised.

    rows       token ids, the prompts of _GIVEN lengths and what is decoded after them
    reference  [length, vocab] float32 logprobs of each of `rows`
    longest    token ids of a row that the sliding window does not hold
    """
    checks: dict[str, Callable[[], float]] = {
        "a padded batch without caches": lambda: _scored(batch, halves, reference, rows),
        "a batch that generates": lambda: _generated(batch, halves, reference, rows),
        "a prompt in chunks": lambda: _chunked(batch, halves, reference, rows),
    }
    if longest is not None:
        checks["a row longer than the sliding window"] = lambda: _beyond(batch, halves, longest)
    if batch.can_share:
        checks[SHARING] = lambda: _shared(batch, halves, reference, rows)
    for name, check in checks.items():
        try:
            difference = check()
        except Exception as error:  # any: it is the architecture's code, on trial
            return f"{name} raises {type(error).__name__}: {error}"
        if not difference <= _TOLERANCE[_dtype(halves)]:  # NaN is a fault
            return f"{name} is off by {difference:.2g} nats"
    return None


def trial_rows(vocab_size: int) -> list[list[int]]:
    draw = Random(0)  # noqa: S311
    return [[draw.randrange(vocab_size) for _ in range(given + _NUM_DECODED)] for given in _GIVEN]


def window_row(window: int, vocab_size: int, seconds: float) -> list[int] | None:
    """A row that crosses the window, if that is quick where the trial rows took `seconds`."""
    num_trial_tokens = sum(_GIVEN) + len(_GIVEN) * _NUM_DECODED
    if seconds * window / num_trial_tokens > _MOST_WINDOW_S:
        return None
    draw = Random(1)  # noqa: S311
    return [draw.randrange(vocab_size) for _ in range(window + _BEYOND)]


def reference_logprobs(model: Any, rows: list[list[int]]) -> list[mx.array]:
    return [_log_softmax(model(mx.array([row]))[0]) for row in rows]


def _dtype(halves: BackboneAndHead) -> mx.Dtype:
    return halves.forward_hidden(mx.array([[0]])).dtype


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _difference(halves: BackboneAndHead, hidden: mx.array, expected: list[mx.array]) -> float:
    """hidden [n, width] against n rows of logprobs [vocab]."""
    found, right = _log_softmax(halves.compute_logits(hidden)), mx.stack(expected)
    distance = mx.where(found == right, 0, mx.abs(found - right))  # -inf of an excluded token equals -inf
    worst: float = distance.mean(axis=-1).max().item()  # type: ignore[assignment]
    return worst


def _scored(batch: BatchRunner, halves: BackboneAndHead, reference: list[mx.array], rows: list[list[int]]) -> float:
    sequences = [Sequence(token_ids=row, score_from=0) for row in rows]
    hidden = batch.prefill([Chunk(sequence, 0, sequence.num_prefill) for sequence in sequences])
    expected = [logprobs[t] for logprobs, row in zip(reference, rows, strict=True) for t in range(len(row) - 1)]
    return _difference(halves, hidden, expected)


def _generated(batch: BatchRunner, halves: BackboneAndHead, reference: list[mx.array], rows: list[list[int]]) -> float:
    """Two rows decode, a third joins them after a score row, the first leaves; the tokens are `rows`'."""
    first, second, third = sequences = [_generating(row) for row in rows]
    scored = Sequence(token_ids=rows[0], score_from=1)
    expected_of = dict(zip(sequences, zip(rows, reference, strict=True), strict=True))

    def decode(decoding: list[Sequence]) -> float:
        for sequence in decoding:
            row, _ = expected_of[sequence]
            sequence.token_ids.append(row[len(sequence.token_ids)])
        expected = [expected_of[sequence][1][len(sequence.token_ids) - 1] for sequence in decoding]
        last_ids = mx.array([sequence.token_ids[-1] for sequence in decoding])
        hidden = batch.decode(decoding, last_ids)
        for sequence in decoding:
            sequence.num_computed += 1
        return _difference(halves, hidden, expected)

    for sequence in sequences:
        sequence.num_computed = sequence.num_input_tokens
    batch.prefill([_whole(first), _whole(second)])
    differences = [decode([first, second])]
    hidden = mx.concatenate([batch.prefill([_whole(row)]) for row in (third, scored)])
    expected = [reference[2][third.num_input_tokens - 1], *(reference[0][t] for t in range(scored.num_prefill))]
    differences.append(_difference(halves, hidden, expected))
    differences.append(decode([first, second, third]))
    batch.release([first])
    differences.append(decode([second, third]))
    batch.release([second, third])
    return max(differences)


def _chunked(batch: BatchRunner, halves: BackboneAndHead, reference: list[mx.array], rows: list[list[int]]) -> float:
    sequence = Sequence(token_ids=rows[0], score_from=1)
    middle = sequence.num_prefill // 2
    first = batch.prefill([Chunk(sequence, 0, middle)])
    second = batch.prefill([Chunk(sequence, middle, sequence.num_prefill)])
    expected = [reference[0][t] for t in range(sequence.num_prefill)]
    return _difference(halves, mx.concatenate([first, second]), expected)


def _beyond(batch: BatchRunner, halves: BackboneAndHead, row: list[int]) -> float:
    """The row's last tokens: scored in two chunks, and generated beside a short row."""
    right = _log_softmax(halves.compute_logits(halves.forward_hidden(mx.array([row]))[0, -_NUM_DECODED - 1 :]))
    expected = [right[place] for place in range(_NUM_DECODED + 1)]
    scored = Sequence(token_ids=row, score_from=len(row) - _NUM_DECODED)
    middle = len(row) // 2
    chunks = Chunk(scored, 0, middle), Chunk(scored, middle, scored.num_prefill)
    hidden = mx.concatenate([batch.prefill([chunk]) for chunk in chunks])
    differences = [_difference(halves, hidden, expected[:-1])]

    decoding = [_generating(row), _generating(row[:7])]
    for sequence in decoding:
        sequence.num_computed = sequence.num_input_tokens
    hidden = batch.prefill([_whole(sequence) for sequence in decoding])
    differences.append(_difference(halves, hidden[:1], expected[:1]))
    for place, token_id in enumerate(row[-_NUM_DECODED:], 1):
        for sequence in decoding:
            sequence.token_ids.append(token_id)
        hidden = batch.decode(decoding, mx.array([token_id] * 2))
        differences.append(_difference(halves, hidden[:1], expected[place : place + 1]))
        for sequence in decoding:
            sequence.num_computed += 1
    batch.release(decoding)
    return max(differences)


def _shared(batch: BatchRunner, halves: BackboneAndHead, reference: list[mx.array], rows: list[list[int]]) -> float:
    """Two rows on one prefix, together; then one of them beside a row on a shorter prefix; then one that generates."""
    longer, shorter = _prefix(batch, rows[0][:8]), _prefix(batch, rows[1][:5])
    whole = Sequence(token_ids=rows[0], score_from=longer.length)
    part = Sequence(token_ids=rows[0][:-2], score_from=longer.length)
    other = Sequence(token_ids=rows[1], score_from=shorter.length)
    generating = _generating(rows[0])

    def difference(chunks: list[Chunk]) -> float:
        expected = [
            reference[0 if chunk.base is longer else 1][position] for chunk in chunks for position in chunk.predictors
        ]
        return _difference(halves, batch.prefill(chunks), expected)

    differences = [
        difference([_onto(whole, longer), _onto(part, longer)]),
        difference([_onto(whole, longer), _onto(other, shorter)]),
        difference([_onto(generating, longer)]),
    ]
    batch.release([generating])
    return max(differences)


def _prefix(batch: BatchRunner, token_ids: list[int]) -> Prefix:
    prefix = Prefix(Prefix(None, []), token_ids)
    batch.prefill([Chunk(Sequence(token_ids=token_ids), 0, len(token_ids), into=prefix)])
    return prefix


def _onto(sequence: Sequence, prefix: Prefix) -> Chunk:
    return Chunk(sequence, prefix.length, sequence.num_prefill, base=prefix)


def _generating(row: list[int]) -> Sequence:
    return Sequence(token_ids=row[:-_NUM_DECODED], sampling=Sampling(max_tokens=_NUM_DECODED))


def _whole(sequence: Sequence) -> Chunk:
    return Chunk(sequence, 0, sequence.num_prefill)
