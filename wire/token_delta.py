"""What is told of a generation while it goes on. The job's result is the truth: it holds every entry again."""

from msgspec import Struct

from scorepool.wire.columns import Floats
from scorepool.wire.result import Channel, ToolCallResult


class TokenDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New entries of one sequence of a job: those of its generated tokens from number `first` on.

    None may be missing from the result, so tokens that may turn out to begin a stop string are held back, and so are
    those of a tool call that has not ended, and the last. After a worker's death the job runs again, and its growths
    begin again at 0.
    """

    id: str
    sequence: int
    first: int
    token_ids: list[int]
    token_bytes: list[bytes]
    logprobs: Floats | None = None
    top_ids: list[list[int]] | None = None
    top_bytes: list[list[bytes]] | None = None
    top_logprobs: list[Floats] | None = None
    channels: list[Channel] | None = None
    tool_calls: list[ToolCallResult] = []  # that end in these entries
    num_prompt_tokens: int | None = None  # beside the first entries of a sequence
    skipped: list[int] = []  # as in the result: numbers of generated tokens, among these entries


TokenDeltas = list[TokenDelta]  # one message on the stream: of all rows of a worker that grew since its last one
