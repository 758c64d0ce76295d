"""How a job ends: a Result or a Failure. There is no third way out."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.columns import Floats

FailureCode = Literal[
    "invalid",  # the request asks for what the model cannot do; `field` says where
    "too_long",  # more tokens than the model's context or the worker's budget
    "numeric",  # the model computed NaN
    "timeout",  # ran longer than its timeout_s
    "expired",  # did not end before its expires_at
    "canceled",  # by its owner
    "crashed",  # took its worker down too often
    "internal",  # a fault of ours
]


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int


class Provenance(Struct, frozen=True, kw_only=True):
    """What computed the numbers. Two results are comparable when their stamps are equal."""

    model: str
    fingerprint: str  # of the weights, the configuration and the tokenizer
    dtype: str
    quantization: str | None
    adapter: str | None
    mode: str  # "default", "exact", or "one row at a time": see docs/numbers.md
    backend: str  # e.g. "metal", "cpu (openblas)"
    versions: dict[str, str]  # scorepool, mlx, mlx-lm


Channel = Literal["content", "reasoning", "tool_call", "markup"]  # markup: what parts the others; it adds to none


class ToolCallResult(Struct, frozen=True, kw_only=True):
    """A function that the model called."""

    id: str  # the same tokens have the same
    name: str
    arguments: str  # a JSON object
    entry: int  # of the generated tokens, the one that ends it


class SequenceResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence. Every column has one entry per reported token, in the order of the text.

    Entry j belongs to `token_ids[j]`: logprobs[j] = log p(token_ids[j] | every token before it), in nats.
    Bytes are base64 in JSON. `token_bytes` joined, but for those of tokens that are `skipped`, are the bytes of `text`;
    where a generation ended at a stop string or at a token that ends it, `text` ends before it and the columns after
    it. A field that is not there has its default.
    """

    token_ids: list[int]
    token_bytes: list[bytes]  # from the vocabulary
    text: str
    logprobs: Floats | None = None
    top_ids: list[list[int]] | None = None  # likeliest first, ties by smaller id; empty where there is no logprob
    top_bytes: list[list[bytes]] | None = None
    top_logprobs: list[Floats] | None = None
    sampled_logprobs: Floats | None = None  # under the distribution sampled from, where that is not the model's own
    recomputed_logprobs: Floats | None = None  # of generated tokens alone, scored again as given ones
    recompute_gap: float | None = None  # nats, the largest difference between them and `logprobs`
    ranks: list[int | None] | None = None
    entropies: Floats | None = None
    logprob_sum: float | None = None  # over the completion's tokens
    is_greedy: bool | None = None  # every completion token is the likeliest; given when rank or top_logprobs is
    num_prompt_tokens: int = 0
    num_reported_prompt_tokens: int = 0  # leading entries that belong to the prompt, where it was to be reported
    prompt_token_ids: list[int] | None = None  # when the prompt was text: the ids that were used
    bos_added: bool = False
    clamped: int = 0  # logprobs that were -inf and are written as -9999.0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # which of `stop_token_ids` or `stop` it was; null: the model's own end token
    skipped: list[int] = []  # numbers of the generated tokens that are special, where `text` is to be without them
    channels: list[Channel] | None = None  # of an answer to a chat: one entry a generated token
    tool_calls: list[ToolCallResult] = []


class Result(Struct, tag="result", frozen=True, kw_only=True):
    """`sequences` follows the request: one per item of a score job, n of a generate job."""

    sequences: list[SequenceResult]
    temperature: float
    usage: Usage
    stamp: Provenance


class Failure(Struct, tag="failure", frozen=True, kw_only=True, omit_defaults=True):
    code: FailureCode
    message: str  # what was wrong, where, what would be right
    field: str | None = None


Outcome = Result | Failure
