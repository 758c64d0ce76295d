"""Read the body of `/v1/completions`, and translate it to one wire.Generate per prompt. Pure.

vLLM's additions to OpenAI's fields: `prompt_logprobs`, `return_token_ids`, `return_tokens_as_token_ids`,
`add_special_tokens`, `skip_special_tokens`, and those of sampling.py.
"""

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.generation_request import GenerationRequest
from scorepool.api.dialects.openai.prompt_logprobs import most_top
from scorepool.api.dialects.openai.sampling import sampling_fields
from scorepool.wire.request_fields import MAX_LIST_LENGTH, NumChoices, NumTokens, Text, TokenId, TokenIds, TopLogprobs

_NAMES = {"prompt": "prompt", "targets": "logprob_token_ids"}


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Complete prompts. A field that is null has its default."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_LIST_LENGTH)]
    max_tokens: NumTokens | None = None
    best_of: NumChoices | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="null is true: special tokens that are generated are not in `text`.")] | None
    ) = None
    suffix: Annotated[None, Meta(description="Not supported.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list) and len({type(prompt) for prompt in self.prompt}) > 1:
            raise ValueError("`prompt` is a string, a list of strings, a list of token ids, or a list of such lists")
        if self.best_of is not None and self.best_of < self.num_choices:
            raise ValueError("`best_of` must be at least `n`")
        if (self.min_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"`min_tokens` must be at most `max_tokens`, {self.max_new_tokens}")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("`max_tokens` 0 generates nothing: it needs `echo`: true or `prompt_logprobs`")
        if self.max_tokens == 0 and self.logprob_token_ids:
            raise ValueError("`logprob_token_ids` are reported at generated tokens: `max_tokens` must be above 0")
        if self.stream and self.echo and self.truncate_prompt_tokens == -1:
            raise ValueError("`truncate_prompt_tokens` -1 cannot be streamed with `echo`: give a number of tokens")
        if self.stream and (self.prompt_logprobs is not None or (self.best_of or 1) > self.num_choices):
            raise ValueError("`prompt_logprobs` and a `best_of` above `n` cannot be streamed")

    @property
    def max_new_tokens(self) -> int:
        """Return how many tokens a choice may have."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def has_token_logprobs(self) -> bool:
        """True if the reply has the logprobs of generated tokens."""
        return self.logprobs is not None

    @property
    def has_logprobs(self) -> bool:
        """True if the reply has logprobs."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def reports_top(self) -> bool:
        """True if the most likely tokens are reported beside any: not if targets are beside all."""
        return bool(self.echo) or not self.logprob_token_ids

    @property
    def echoes_in_stream(self) -> bool:
        """True if each prompt has a job of its own, which reports the prompt before the generated tokens come."""
        return bool(self.stream and self.echo) and self.max_new_tokens > 0


def to_requests(body: CompletionRequest, timeout_s: int) -> Iterator[wire.Generate]:
    """Build one request per prompt, so that the workers of a model share the prompts.

    A stream that echoes has one more per prompt, behind the others: it reports the prompt's tokens and generates none.
    """
    yield from _generates(body, timeout_s)
    if body.echoes_in_stream:
        yield from map(_prompt_request, _generates(body, timeout_s))


def _generates(body: CompletionRequest, timeout_s: int) -> Iterator[wire.Generate]:
    """Build the request that generates, for each prompt."""
    num_top = body.logprobs or 0 if body.reports_top else 0
    num_sequences = max(body.num_choices, body.best_of or 1)
    wants_logprobs = body.has_logprobs or num_sequences > body.num_choices
    for prompt in body.prompts:
        yield wire.Generate(
            **sampling_fields(body, timeout_s),
            **body.form_fields,
            **body.truncation_fields,
            prompt=prompt,
            max_tokens=body.max_new_tokens,
            n=num_sequences,
            add_bos=body.add_special_tokens is not False,
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_logprobs=(bool(body.echo) and not body.echoes_in_stream) or body.prompt_logprobs is not None,
            logprobs=wants_logprobs,
            top_logprobs=most_top(num_top, body.prompt_logprobs or 0),
            rank=body.prompt_logprobs is not None,
        )


def _prompt_request(generate: wire.Generate) -> wire.Generate:
    """Build the request that reports the tokens of a prompt."""
    return wire.Generate(
        model=generate.model,
        timeout_s=generate.timeout_s,
        priority=generate.priority,
        if_weights=generate.if_weights,
        cache_salt=generate.cache_salt,
        prompt=generate.prompt,
        add_bos=generate.add_bos,
        truncate=generate.truncate,
        truncate_to=generate.truncate_to,
        max_tokens=0,
        temperature=generate.temperature,
        prompt_logprobs=True,
        logprobs_mode=generate.logprobs_mode,
        logprobs=generate.logprobs,
        top_logprobs=generate.top_logprobs,
    )


def field_name(body: CompletionRequest, field: str) -> str:
    """Map `[1].prompt[0]` to `prompt[1][0]`; a body of one prompt has no index."""
    num_prompts = len(body.prompts)
    index, rest = re.fullmatch(r"(?:\[(\d+)\]\.?)?(.*)", field, re.DOTALL).groups()  # type: ignore[union-attr]
    to_field = map_field(_NAMES | body.field_names, list_field="prompt")
    if index is None or num_prompts == 1:
        return to_field(rest)
    return to_field(f"[{int(index) % num_prompts}].{rest}")
