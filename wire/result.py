"""Outcomes: a job ends in a Result or in a Failure, never in anything else."""

from typing import Literal

from msgspec import Struct, field

from scorepool.wire.columns import Floats, StreamedColumns

FailureCode = Literal[
    "invalid",  # the model cannot do what the request asks for; `field` names the place
    "too_long",  # more tokens than the model's context or the worker's budget allows
    "numeric",  # the model computed NaN
    "timeout",  # ran longer than its timeout_s
    "expired",  # did not end before its expires_at
    "canceled",  # its owner canceled it
    "crashed",  # its worker died too often while it ran
    "internal",  # a bug in scorepool
]


class Usage(Struct, frozen=True, kw_only=True):
    """The number of tokens that a job read and wrote."""

    prompt_tokens: int
    completion_tokens: int


class Provenance(Struct, frozen=True, kw_only=True):
    """The model, weights and software that computed a result. Results are comparable if their stamps are equal."""

    model: str
    fingerprint: str  # of the weights, the configuration and the tokenizer
    dtype: str
    quantization: str | None
    adapter: str | None
    mode: str  # "default", "exact", or "one row at a time": see docs/numbers.md
    backend: str  # e.g. "metal", "cpu (openblas)"
    versions: dict[str, str]  # scorepool, mlx, mlx-lm


Channel = Literal["content", "reasoning", "tool_call", "markup"]  # markup: separators, in no other channel


class ToolCallResult(Struct, frozen=True, kw_only=True):
    """A function that the model called."""

    id: str  # the same tokens give the same id
    name: str
    arguments: str  # a JSON object
    entry: int  # index of the generated token that ends the call


class SequenceResult(StreamedColumns, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one sequence. Every column has one entry per reported token, in the order of the text.

    Entry j belongs to `token_ids[j]`: logprobs[j] = log p(token_ids[j] | every token before it), in nats.
    Bytes are base64 in JSON. The joined `token_bytes`, without those of `skipped` tokens, are the bytes of `text`.
    If a stop string or an end token ended the generation, `text` ends before it and the columns include it.
    An absent field has its default.
    """

    text: str
    sampled_logprobs: Floats | None = None  # under the distribution sampled from, if it is not the model's own
    recomputed_logprobs: Floats | None = None  # of the generated tokens only, scored again as given tokens
    recompute_gap: float | None = None  # nats, largest difference between `recomputed_logprobs` and `logprobs`
    ranks: list[int | None] | None = None
    entropies: Floats | None = None
    logprob_sum: float | None = None  # over the completion's tokens
    is_greedy: bool | None = None  # True if each completion token is the most likely; needs rank or top_logprobs
    num_prompt_tokens: int = 0
    num_reported_prompt_tokens: int = 0  # leading entries that belong to the prompt, if it is reported
    prompt_token_ids: list[int] | None = None  # if the prompt was text: the ids that were used
    bos_added: bool = False
    clamped: int = 0  # how many logprobs were -inf and are written as -9999.0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # the item of `stop_token_ids` or `stop`; null: the model's own end token
    skipped: list[int] = field(default_factory=list)  # indices of generated special tokens that `text` leaves out
    channels: list[Channel] | None = None  # for a chat: one entry per generated token
    tool_calls: list[ToolCallResult] = field(default_factory=list)


class Result(Struct, tag="result", frozen=True, kw_only=True):
    """The result of a job. `sequences` has one entry per item of a score job, and n for a generate job."""

    sequences: list[SequenceResult]
    temperature: float
    usage: Usage
    stamp: Provenance


class Failure(Struct, tag="failure", frozen=True, kw_only=True, omit_defaults=True):
    """The reason why a job has no result."""

    code: FailureCode
    message: str  # names the field, the value and what is expected
    field: str | None = None


Outcome = Result | Failure
