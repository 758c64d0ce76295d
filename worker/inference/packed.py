"""Build wire.PackedColumns from sequences that are done. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from scorepool import wire
from scorepool.engine import Sequence
from scorepool.wire import Floats
from scorepool.wire.packed import NO_RANK, NO_TOKEN, pack_ints
from scorepool.worker.inference.columns import COLUMNS, Clamp, CountingClamp, clamped
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.summary import about, failed_item, summary


def to_packed(
    prepared: Items[PreparedSequence], first: Items[int], with_logprobs: bool
) -> tuple[list[wire.SequenceResult], wire.PackedColumns]:
    """Return the sequences without columns, and their columns. `first` are the positions of their first tokens.

    Raises JobError (numeric) at a NaN, ValueError if a column has not one entry for each token.
    """
    num_top = max(each.sequence.top_logprobs for each in prepared) if with_logprobs else 0
    num_targets = _most_targets([each.sequence for each in prepared]) if with_logprobs else None
    sequences = []
    packed: dict[str, bytearray] = defaultdict(bytearray, token_ids=bytearray())
    for each, start in zip(prepared, first, strict=True):
        if each.failure is not None:
            sequences.append(failed_item(each.failure))
            continue
        fields = about(each, start)
        sequence, num_tokens = each.sequence, len(each.sequence.token_ids) - start
        packed["token_ids"] += pack_ints(sequence.token_ids[start:])
        if with_logprobs:
            clamp = CountingClamp()
            logprobs = clamped(sequence.columns.logprobs, clamp)
            packed["logprobs"] += logprobs.pack()
            for name, column, width in _other_columns(sequence, num_tokens, num_top, num_targets, clamp):
                packed[name] += column
                _check_length(name, len(column), num_tokens * width)
            _check_length("logprobs", 4 * len(logprobs), num_tokens)
            fields |= summary(sequence, logprobs, max(0, each.num_prompt_tokens - start)) | {"clamped": clamp.count}
        sequences.append(wire.SequenceResult(token_ids=[], token_bytes=[], text="", **fields))  # type: ignore[arg-type]
    lengths = [max(0, len(each.sequence.token_ids) - start) for each, start in zip(prepared, first, strict=True)]
    return sequences, wire.PackedColumns(lengths=lengths, num_top=num_top, num_targets=num_targets or 0, **packed)


def _check_length(name: str, num_bytes: int, expected: int) -> None:
    if num_bytes != 4 * expected:
        raise ValueError(f"{name} has {num_bytes // 4} entries, expected {expected}")


def _other_columns(
    sequence: Sequence, num_tokens: int, num_top: int, num_targets: int | None, clamp: Clamp
) -> Iterator[tuple[str, bytes | bytearray, int]]:
    """Yield the name, the bytes and the numbers for each token of the columns that the job was asked for.

    Every sequence of a job has the same columns. Targets alone may be asked for by some items only: the others have
    rows of missing values.
    """
    columns = sequence.columns
    if sequence.rank:
        yield "ranks", pack_ints(NO_RANK if rank is None else rank for rank in columns.ranks), 1
    if sequence.entropy:
        yield "entropies", clamped(columns.entropies, clamp).pack(), 1
    if COLUMNS["sampled_logprobs"].is_reported(sequence):
        prompt = [None] * (num_tokens - len(columns.sampled_logprobs))
        yield "sampled_logprobs", clamped([*prompt, *columns.sampled_logprobs], clamp).pack(), 1
    if num_top:
        no_ids, no_logprobs = bytes(pack_ints([NO_TOKEN] * num_top)), Floats([None] * num_top).pack()
        yield "top_ids", _rows(map(_packed_ids, columns.top_ids), no_ids), num_top
        yield "top_logprobs", _rows((clamped(row, clamp).pack() for row in columns.top_logprobs), no_logprobs), num_top
    if num_targets is not None:
        no_targets = Floats([None] * num_targets).pack()
        rows = (clamped(row, clamp).pack() for row in columns.target_logprobs)
        column = no_targets * num_tokens if sequence.targets is None else _rows(rows, no_targets)
        yield "target_logprobs", column, num_targets


def _packed_ids(token_ids: Items[int]) -> bytes:
    return bytes(pack_ints(token_ids))


def _rows(rows: Iterable[bytes], missing: bytes) -> bytes:
    """Join rows, each filled up to the length of `missing`."""
    return b"".join(row if len(row) == len(missing) else row + missing[len(row) :] for row in rows)


def _most_targets(sequences: Iterable[Sequence]) -> int | None:
    """Return how many targets a token has at most; None if no sequence has targets."""
    targets = [sequence.targets for sequence in sequences if sequence.targets is not None]
    return max((len(ids) for each in targets for ids in each.lists), default=0) if targets else None
