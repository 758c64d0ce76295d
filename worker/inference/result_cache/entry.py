"""Convert what was computed of a sequence to an entry of the result cache, and give it to another sequence. Pure."""

from collections.abc import Iterable
from dataclasses import fields
from math import isnan
from typing import Any

from scorepool.engine import ModelInfo, Sequence, TokenColumns
from scorepool.wire import CachedSequence, Floats

RESULTS = {
    *("columns", "text_bytes", "finish_reason", "stop_reason"),
    *("class_logits", "embedding", "error", "model_info"),
}
INPUTS = tuple(each.name for each in fields(Sequence) if each.init and each.name not in RESULTS)


def to_entry(digest: bytes, sequence: Sequence) -> CachedSequence:
    return CachedSequence(digest=digest, **entry_fields(sequence))


def entry_fields(sequence: Sequence) -> dict[str, Any]:
    """Return the fields of an entry but its digest."""
    columns = sequence.columns
    return {
        "generated_ids": sequence.token_ids[sequence.num_input_tokens :],
        "text": sequence.text_bytes,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "logprobs": Floats(columns.logprobs),
        "top_ids": [list(ids) for ids in columns.top_ids],
        "top_logprobs": [Floats(values) for values in columns.top_logprobs],
        "target_logprobs": [Floats(values) for values in columns.target_logprobs],
        "ranks": columns.ranks,
        "entropies": Floats(columns.entropies) if columns.entropies else None,
        "min_logprobs": Floats(columns.min_logprobs) if columns.min_logprobs else None,
        "sampled_logprobs": Floats(columns.sampled_logprobs) if columns.sampled_logprobs else None,
    }


def fill_from_entry(sequence: Sequence, entry: CachedSequence, info: ModelInfo) -> None:
    """Give an entry's values to a sequence that has not begun. Raises ValueError if they are not those of one."""
    num_tokens = len(sequence.token_ids) + len(entry.generated_ids) - sequence.first_reported
    columns = TokenColumns(
        logprobs=_values(entry.logprobs),
        top_ids=list(entry.top_ids),
        top_logprobs=list(entry.top_logprobs),
        target_logprobs=list(entry.target_logprobs),
        ranks=entry.ranks,
        entropies=_values(entry.entropies or ()),
        min_logprobs=_values(entry.min_logprobs or ()),
        sampled_logprobs=list(entry.sampled_logprobs or ()),
    )
    expected = {
        "logprobs": True,
        "top_ids": sequence.top_logprobs > 0,
        "top_logprobs": sequence.top_logprobs > 0,
        "target_logprobs": sequence.targets is not None,
        "ranks": sequence.rank,
        "entropies": sequence.entropy,
        "min_logprobs": sequence.min_logprob,
    }
    lengths = {name: len(getattr(columns, name)) for name in expected} | {"sampled": len(columns.sampled_logprobs)}
    wanted = {name: num_tokens * is_wanted for name, is_wanted in expected.items()}
    wanted["sampled"] = len(entry.generated_ids)
    is_generated = sequence.sampling is not None
    if lengths != wanted or (entry.finish_reason is not None) != is_generated or (entry.text is None) is is_generated:
        raise ValueError(f"it has {lengths} entries, expected {wanted}")
    sequence.token_ids = [*sequence.token_ids, *entry.generated_ids]
    sequence.columns = columns
    sequence.text_bytes, sequence.finish_reason = entry.text, entry.finish_reason
    sequence.stop_reason, sequence.model_info = entry.stop_reason, info


def fill_from_sequence(sequence: Sequence, computed: Sequence) -> None:
    """Give the values of a sequence that is done to one that asks for the same. They share them: nobody writes them."""
    sequence.model_info = computed.model_info  # first: who sees that the sequence is done reads what computed it
    sequence.token_ids = computed.token_ids
    sequence.columns = computed.columns
    sequence.text_bytes, sequence.stop_reason = computed.text_bytes, computed.stop_reason
    sequence.finish_reason = computed.finish_reason
    sequence.error = computed.error


def copy_unbegun(sequence: Sequence) -> Sequence:
    """Return a sequence that asks for the same and has not begun."""
    inputs = {name: getattr(sequence, name) for name in INPUTS}
    return Sequence(**inputs | {"token_ids": sequence.token_ids[: sequence.num_input_tokens]})


def _values(column: Iterable[float]) -> list[float | None]:
    return [None if isnan(value) else value for value in column]
