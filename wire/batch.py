"""Define batches as the API shows them: many requests from a file. The fields are OpenAI's."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool.wire.file import FILE_KEPT_S, ExpiresAfter, LastId
from scorepool.wire.quote import quote
from scorepool.wire.result import Result

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
LineEndpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
_WINDOW = re.compile(r"[1-9][0-9]{0,2}[mhd]")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


class CreateBatch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Run the requests of a file."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: LineEndpoint
    completion_window: Annotated[
        str,
        Meta(description="24h as at OpenAI, or 30m, 7d, ...", extra_json_schema={"pattern": "^[1-9][0-9]{0,2}[mhd]$"}),
    ]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.completion_window, str) or not _WINDOW.fullmatch(self.completion_window):
            raise ValueError(
                f"`completion_window` is {quote(self.completion_window)}; expected a number of minutes, hours or days, "
                "such as 30m, 24h or 7d"
            )
        if self.window_s > FILE_KEPT_S:
            raise ValueError("`completion_window` is at most 30d")

    @property
    def window_s(self) -> int:
        """Return `completion_window` in seconds."""
        return int(self.completion_window[:-1]) * _UNITS_S[self.completion_window[-1]]


class BatchError(Struct, frozen=True, kw_only=True):
    """Say what is wrong with the input file, or with one of its lines."""

    code: str
    message: str
    line: Annotated[int | None, Meta(description="Number of the line, the first being 1.")] = None
    param: Annotated[str | None, Meta(description="The field of the line that is at fault.")] = None


class BatchErrors(Struct, frozen=True, kw_only=True):
    """List the first 100 errors of an input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, frozen=True, kw_only=True):
    """Count the lines of a batch."""

    total: int = 0
    completed: Annotated[int, Meta(description="Lines in the output file.")] = 0
    failed: Annotated[int, Meta(description="Lines in the error file, also those that were not run in time.")] = 0
    cancelled: Annotated[
        int | UnsetType, Meta(description="Those of `failed` that a cancellation kept from running, if any.")
    ] = UNSET
    expired: Annotated[int | UnsetType, Meta(description="Those of `failed` that were not run in time, if any.")] = (
        UNSET
    )


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """Divide input tokens."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were not computed for these results.")] = 0
    cache_write_tokens: Annotated[int, Meta(description="Always 0: not counted.")] = 0
    kept_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="An addition. Tokens that went through the model, of requests with `specprefill`: all of a "
            "short prompt. Absent: there was no such request."
        ),
    ] = UNSET


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """Divide output tokens."""

    reasoning_tokens: Annotated[
        int, Meta(description="Tokens of chats in the channel `reasoning`. Answers of models without it count 0.")
    ] = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    """Count the tokens of all completed lines."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0

    @classmethod
    def of_results(cls, results: Iterable[Result]) -> Self:
        """Count the tokens of the results of a line's jobs."""
        num_in = num_out = num_reasoning = num_cached = 0
        kept = []
        for result in results:
            num_in += result.usage.prompt_tokens
            num_out += result.usage.completion_tokens
            num_cached += result.usage.cached_tokens
            num_reasoning += sum(sequence.num_reasoning_tokens for sequence in result.sequences)
            if result.usage.kept_tokens is not None:
                kept.append(result.usage.kept_tokens)
        return cls._build(num_in, num_out, num_reasoning, num_cached, kept)

    def __add__(self, other: Self) -> Self:
        counts = (each.input_tokens_details.kept_tokens for each in (self, other))
        return self._build(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens,
            self.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens,
            [count for count in counts if count is not UNSET],
        )

    @classmethod
    def _build(cls, num_in: int, num_out: int, num_reasoning: int, num_cached: int, kept: Sequence[int]) -> Self:
        return cls(
            input_tokens=num_in,
            input_tokens_details=InputTokensDetails(cached_tokens=num_cached, kept_tokens=sum(kept) if kept else UNSET),
            output_tokens=num_out,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=num_in + num_out,
        )


class Batch(Struct, frozen=True, kw_only=True):
    """Show a batch. Times are whole seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: LineEndpoint
    model: Annotated[str | None, Meta(description="The model that all lines name. null: they name several.")] = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    estimated_end_at: Annotated[
        int | None,
        Meta(
            description="While lines run: when the last one ends if the rest take as long as those before did, without "
            "the wait for the first; at most `expires_at`. null: no line has ended yet or lately, or the batch has."
        ),
    ] = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class BatchPage(Struct, frozen=True, kw_only=True):
    """List batches, newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: LastId
    has_more: bool
