"""Read how much of a prompt is kept, as vLLM's bodies name it: `truncate_prompt_tokens` and `truncation_side`. Pure."""

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

TruncatePromptTokens = Annotated[
    Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
    Meta(description="Keep so many tokens of the prompt at most. -1: as many as the context holds."),
]
Side = Literal["left", "right"]
LEFT: Side = "left"
RIGHT: Side = "right"
NAMES = {"truncate_to": "truncate_prompt_tokens", "truncate": "truncation_side"}


class TruncationFields(TypedDict):
    """Type the fields of a job that cut its prompts."""

    truncate: Side | None
    truncate_to: int | None


def truncation_fields(num_tokens: int | None, side: Side | None, default: Side) -> TruncationFields:
    """Return the fields of a job. vLLM's default is to cut generations on the left and what is pooled on the right."""
    if num_tokens is None:
        return TruncationFields(truncate=None, truncate_to=None)
    return TruncationFields(truncate=side or default, truncate_to=None if num_tokens == -1 else num_tokens)


def check_truncation(num_tokens: int | None) -> None:
    """Check a number of tokens to keep; raise ValueError."""
    if num_tokens == 0:
        raise ValueError("`truncate_prompt_tokens` must be at least 1, or -1 for what the context holds")
