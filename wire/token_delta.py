"""Token deltas: new tokens of a generation, streamed while it runs. The job's result repeats every entry."""

from msgspec import field

from scorepool.wire.columns import StreamedColumns
from scorepool.wire.result import Channel, ToolCallResult


class TokenDelta(StreamedColumns, frozen=True, kw_only=True, omit_defaults=True):
    """New entries of one sequence of a job: its generated tokens from index `first` on.

    Every streamed entry is in the result too. Tokens that may begin a stop string, tokens of an unfinished tool call
    and the last token are therefore held back. After a worker's death the job runs again, and its deltas start again
    at index 0.
    """

    id: str
    sequence: int
    first: int
    channels: list[Channel] | None = None
    tool_calls: list[ToolCallResult] = field(default_factory=list)  # calls that end in these entries
    num_prompt_tokens: int | None = None  # only with the first entries of a sequence
    skipped: list[int] = field(default_factory=list)  # as in the result, only indices of these entries


TokenDeltas = list[TokenDelta]  # one stream entry: every sequence of a worker with new tokens
