"""Report the tokens of a prompt as vLLM does: one entry per token, by token id. Pure."""

from typing import Annotated

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.detokenizer import token_text, top_tokens
from scorepool.wire.request_fields import WHOLE_VOCABULARY


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """Report a token of the prompt, or one of the most likely tokens in its place, as vLLM does."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Meta(description="Present if asked for: one entry per token of the prompt, by token id."),
]


def most_top(*numbers: int) -> int:
    """Return the number of most likely tokens that a job must report, of those that parts of the reply need."""
    return WHOLE_VOCABULARY if WHOLE_VOCABULARY in numbers else max(numbers)


def to_prompt_logprobs(sequence: wire.SequenceResult, k: int) -> list[dict[str, PromptLogprob] | None]:
    """Return the actual token and the k most likely ones of each entry, by token id; null for the first token.

    The actual token is the first key, as in vLLM: inspect-ai takes the first for the actual one.
    """
    assert sequence.logprobs is not None
    assert sequence.ranks is not None
    logprobs = sequence.logprobs.values()
    found: list[dict[str, PromptLogprob] | None] = []
    for entry in range(sequence.num_reported_prompt_tokens):
        logprob, rank = logprobs[entry], sequence.ranks[entry]
        if logprob is None or rank is None:
            found.append(None)
            continue
        actual = (sequence.token_ids[entry], sequence.token_bytes[entry], logprob, rank)
        top = top_tokens(sequence, entry)[: None if k == WHOLE_VOCABULARY else k]
        ranked = [(*token, number) for number, token in enumerate(top, start=1)]
        found.append(
            {
                str(token_id): PromptLogprob(
                    logprob=value, rank=number, decoded_token=token_text(token_id, token_bytes)
                )
                for token_id, token_bytes, value, number in [actual, *(top for top in ranked if top[0] != actual[0])]
                if value is not None
            }
        )
    return found
