"""Convert sequences to Arrow tables. Imports pyarrow, so `Result` imports it on first use. Knows no field's meaning.

To add a field to SequenceResult, add its type to SCHEMA.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from msgspec import Struct, to_builtins

from scorepool.wire.columns import Floats, StreamedColumns

_INTS, _FLOATS, _BYTES = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.binary())
_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string()), ("entry", pa.int32())])
_FAILURE = pa.struct([("code", pa.string()), ("message", pa.string()), ("field", pa.string())])
_DRAFT = pa.struct(
    [
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("draft_logprob", pa.float32()),
        ("logprob", pa.float32()),
        ("accepted", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("token_ids", _INTS),
        ("token_bytes", _BYTES),
        ("logprobs", _FLOATS),
        ("top_ids", pa.list_(_INTS)),
        ("top_bytes", pa.list_(_BYTES)),
        ("top_logprobs", pa.list_(_FLOATS)),
        ("sampled_logprobs", _FLOATS),
        ("target_logprobs", pa.list_(_FLOATS)),
        ("target_bytes", _BYTES),
        ("recomputed_logprobs", _FLOATS),
        ("recompute_gap", pa.float64()),
        ("draft_logprobs", pa.list_(_DRAFT)),
        ("ranks", _INTS),
        ("entropies", _FLOATS),
        ("logprob_sum", pa.float64()),
        ("is_greedy", pa.bool_()),
        ("num_prompt_tokens", pa.int32()),
        ("num_reported_prompt_tokens", pa.int32()),
        ("prompt_token_ids", _INTS),
        ("bos_added", pa.bool_()),
        ("clamped", pa.int32()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),  # a token's id is written in digits
        ("skipped", _INTS),
        ("channels", pa.list_(pa.string())),
        ("tool_calls", pa.list_(_CALL)),
        ("truncated", pa.int32()),
        ("failure", _FAILURE),
    ]
)
LABEL_SCHEMA = pa.schema(
    [
        ("label", pa.string()),
        ("logits", _FLOATS),
        ("probs", _FLOATS),
        ("num_tokens", pa.int32()),
        ("truncated", pa.int32()),
        ("failure", _FAILURE),
    ]
)


def arrow_table(sequences: Sequence[StreamedColumns]) -> pa.Table:
    """Return a table of SCHEMA with one row per sequence. Missing values are null, also those in lists."""
    return _table(sequences, SCHEMA)


def label_table(classifications: Sequence[Struct]) -> pa.Table:
    """Return a table of LABEL_SCHEMA with one row per item of a classify job."""
    return _table(classifications, LABEL_SCHEMA)


def _table(rows: Sequence[Struct], schema: pa.Schema) -> pa.Table:
    columns = {field.name: [_plain(field, getattr(each, field.name)) for each in rows] for field in schema}
    return pa.table(columns, schema=schema)


def _plain(field: pa.Field, value: Any) -> Any:
    """Convert a value to what Arrow reads as the type of its field."""
    if isinstance(value, Floats):
        return value.values()
    if isinstance(value, Struct):
        return to_builtins(value)
    if isinstance(value, int) and field.type == pa.string():
        return str(value)
    if isinstance(value, list) and value and isinstance(value[0], Floats | Struct):
        return [each.values() if isinstance(each, Floats) else to_builtins(each) for each in value]
    return value
