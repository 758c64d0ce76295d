"""Build the fields of wire.SequenceResult that say something about a sequence as a whole. Pure."""

from collections.abc import Iterable
from math import fsum, isnan

from scorepool import wire
from scorepool.engine import Sequence
from scorepool.wire import Floats
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.rq.errors import JobError


def about(prepared: PreparedSequence, first: int) -> dict[str, object]:
    """Return the fields that need no column. `first` is the position of the first reported token.

    Raises JobError if the grammar of the answer failed.
    """
    sequence, num_prompt_tokens = prepared.sequence, prepared.num_prompt_tokens
    if sequence.constraint_error is not None:
        raise JobError(wire.Failure(code="invalid", message=f"the answer's grammar: {sequence.constraint_error}"))
    stop_reason = sequence.stop_reason
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_reported_prompt_tokens": max(0, num_prompt_tokens - first),
        "prompt_token_ids": sequence.token_ids[:num_prompt_tokens] if prepared.is_prompt_text else None,
        "bos_added": prepared.bos_added,
        "truncated": prepared.num_truncated,
        "finish_reason": sequence.finish_reason,
        "stop_reason": stop_reason.decode() if isinstance(stop_reason, bytes) else stop_reason,
    }


def failed_item(failure: wire.Failure) -> wire.SequenceResult:
    """Return the place of an item that has no tokens."""
    return wire.SequenceResult(token_ids=[], token_bytes=[], text="", failure=failure)


def summary(sequence: Sequence, logprobs: Floats, num_prompt_entries: int) -> dict[str, object]:
    """Return the fields that summarise the completion: its logprobs' sum, and whether it is greedy."""
    fields: dict[str, object] = {}
    logprob_sum = fsum(logprobs[num_prompt_entries:])
    if not isnan(logprob_sum):  # a missing logprob is NaN in Floats
        fields["logprob_sum"] = logprob_sum
    columns = sequence.columns
    if sequence.rank:
        ranks = columns.ranks[num_prompt_entries:]
        fields["is_greedy"] = _all_known(None if rank is None else rank == 1 for rank in ranks)
    elif sequence.top_logprobs:
        top_ids = columns.top_ids[num_prompt_entries:]
        token_ids = sequence.token_ids[len(sequence.token_ids) - len(top_ids) :]
        fields["is_greedy"] = _all_known(
            top[0] == token_id if top else None for token_id, top in zip(token_ids, top_ids, strict=True)
        )
    return fields


def _all_known(values: Iterable[bool | None]) -> bool | None:
    """Return whether all are true, or None if one is not known."""
    known = list(values)
    return None if None in known else all(known)
