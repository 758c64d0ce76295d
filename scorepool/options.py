"""Type the keyword arguments of `Client.score` and the like: the fields of the requests in `wire`.

To add a field to a request, add it here too, or to `wire.SamplingOptions`. tests/scorepool/test_options.py compares
names and types.
"""

from typing import Any, Literal, TypedDict

from scorepool.wire import Image, LogprobsMode, Message, Priority, SamplingOptions, Tool


class JobOptions(TypedDict, total=False):
    """Options of every job."""

    priority: Priority
    timeout_s: int
    expires_at: float | None
    webhook: str | None
    if_weights: int | None
    adapter: str | None
    wait_for_model: bool


class ScoreOptions(JobOptions, total=False):
    """Options of `Client.score`. With `prompt`, items are the completions after it."""

    prompt: str | list[int] | None
    images: list[Image]

    score: Literal["completion", "all"]
    top_logprobs: int
    targets: list[int] | None
    temperature: float
    rank: bool
    entropy: bool
    packed: bool
    on_item_error: Literal["fail", "report"]
    truncate: Literal["left", "right"] | None
    cache: bool
    cache_salt: str | None


class CompareOptions(JobOptions, total=False):
    """Options of `Client.compare`. With `prompt`, items are the completions after it."""

    prompt: str | list[int] | None
    top_logprobs: int
    temperature: float
    rank: bool
    cache: bool
    cache_salt: str | None


class GenerateOptions(JobOptions, SamplingOptions, total=False):
    """Options of `Client.generate`. Give `messages` instead of a prompt to answer a chat."""

    messages: list[Message] | None
    images: list[Image]
    tools: list[Tool]
    tool_choice: Literal["auto", "none", "required"]
    allowed_tools: list[str]
    parallel_tool_calls: bool
    chat_template_kwargs: dict[str, bool | int | float | str | None]
    max_tokens: int | None
    skip_special_tokens: bool | None
    n: int
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    truncate: Literal["left", "right"] | None
    truncate_to: int | None
    add_bos: bool
    prompt_logprobs: bool
    logprobs: bool
    logprobs_mode: LogprobsMode | None
    top_logprobs: int
    targets: list[int] | None
    target_bytes: bool
    rank: bool
    speculation: Literal["off", "ngram", "draft", "mtp"] | None
    speculation_tokens: int | None
    include_draft_logprobs: bool
    specprefill: bool
    specprefill_keep_pct: float | None
    recompute: bool
    stream: bool
    packed: bool
    cache: bool
    cache_salt: str | None


class ClassifyOptions(JobOptions, total=False):
    """Options of `Client.classify`."""

    add_special_tokens: bool
    on_item_error: Literal["fail", "report"]
    truncate: Literal["left", "right"] | None
    truncate_to: int | None
    cache_salt: str | None


class EmbedOptions(JobOptions, total=False):
    """Options of `Client.embed`."""

    pooling: Literal["last", "mean"] | None
    normalize: bool
    dimensions: int | None
    add_special_tokens: bool
    truncate: Literal["left", "right"] | None
    truncate_to: int | None


class TokenizeOptions(JobOptions, total=False):
    """Options of `Client.tokenize`. Give `messages` instead of a prompt to see a chat as the model reads it."""

    messages: list[Message] | None
    tools: list[Tool]
    chat_template_kwargs: dict[str, bool | int | float | str | None]
    add_bos: bool
