"""Build the wire.Result of an embed job from sequences that are done. Pure."""

from collections.abc import Sequence as Items
from math import fsum, sqrt

from msgspec.structs import replace

from scorepool import wire
from scorepool.wire import Floats
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.text_lengths import invalid_request


def to_embedded(request: wire.Embed, prepared: Items[PreparedSequence], provenance: wire.Provenance) -> wire.Result:
    """Return the job's result. Raises JobError for more dimensions than there are."""
    return wire.Result(
        sequences=[],
        embeddings=[_to_embedding(request, each) for each in prepared],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=sum(each.num_prompt_tokens for each in prepared), completion_tokens=0),
        stamp=replace(provenance, pooling=prepared[0].sequence.pooling),
    )


def _to_embedding(request: wire.Embed, prepared: PreparedSequence) -> wire.Embedding:
    values = prepared.sequence.embedding
    if values is None:
        raise ValueError("a sequence of an embed job has no embedding")
    if request.dimensions is not None:
        if request.dimensions > len(values):
            sentence = f"expected at most {len(values)}, the width of the model, found {request.dimensions}"
            raise invalid_request("dimensions", sentence)
        values = values[: request.dimensions]
    if request.normalize:
        values = normalized(values)
    return wire.Embedding(
        values=Floats(values), num_tokens=prepared.num_prompt_tokens, truncated=prepared.num_truncated
    )


def normalized(values: Items[float]) -> list[float]:
    """Return a vector of length 1; one of zeros stays."""
    length = sqrt(fsum(value * value for value in values))
    return [value / length for value in values] if length else list(values)
