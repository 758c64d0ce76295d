"""Define token deltas: new tokens of a generation, streamed while it runs. The job's result repeats every entry."""

from typing import Annotated

from msgspec import Meta, Struct, field

from scorepool.wire.columns import StreamedColumns
from scorepool.wire.result import CHANNELS, Channel, ToolCallResult


class TokenDelta(StreamedColumns, frozen=True, kw_only=True, omit_defaults=True):
    """Report new entries of one sequence of a job: its generated tokens from index `first` on.

    Every streamed entry is in the result too. Tokens that may begin a stop string, tokens of an unfinished tool call
    and the last token are therefore held back. When a job runs again, because its worker died or was away, the deltas
    of the new run start again at index 0, and those of an earlier run may still come.
    """

    id: Annotated[str, Meta(description="Id of the job.")]
    sequence: Annotated[int, Meta(description="Index of the sequence in the job's result.")]
    run: Annotated[
        int,
        Meta(description="Run of the job: a later run has a greater number. 0 if the worker is of release 0.1.0."),
    ] = 0
    first: Annotated[int, Meta(description="Index of the first entry among the sequence's generated tokens.")]
    channels: Annotated[list[Channel] | None, Meta(description=f"One entry per token of a chat. {CHANNELS}")] = None
    tool_calls: Annotated[list[ToolCallResult], Meta(description="The calls that end in these entries.")] = field(
        default_factory=list
    )
    num_prompt_tokens: Annotated[int | None, Meta(description="Present with the first entries of a sequence only.")] = (
        None
    )
    target_bytes: Annotated[
        list[bytes] | None,
        Meta(description="Bytes of the request's `targets`. Present with the first entries of a sequence only."),
    ] = None
    weights: Annotated[
        str | None,
        Meta(
            description="The fingerprint of the weights that computed the entries, and the adapter after a comma. "
            "Present with the first entries of a sequence only."
        ),
    ] = None
    skipped: Annotated[
        list[int], Meta(description="Indices of generated special tokens that the text leaves out, of these entries.")
    ] = field(default_factory=list)


TokenDeltas = list[TokenDelta]  # one stream entry: every sequence of a worker with new tokens


class MissingTokens(Struct, frozen=True, kw_only=True):
    """Ask the worker of a job to publish generated tokens of one sequence again, from index `first` on."""

    id: str  # of the job
    sequence: Annotated[int, Meta(ge=0)]
    first: Annotated[int, Meta(ge=0)]
