"""Read the body of `/v1/chat/completions`, and translate it to one wire.Generate. Pure."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.generation_request import GenerationRequest
from scorepool.api.dialects.openai.messages import ChatMessage, ChatTool
from scorepool.api.dialects.openai.prompt_logprobs import most_top
from scorepool.api.dialects.openai.sampling import Label, NoEffect, sampling_fields
from scorepool.api.dialects.openai.structured_outputs import (
    NamedToolChoice,
    ToolChoice,
    allowed_tool_names,
    tool_choice_mode,
)
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.batch import Metadata
from scorepool.wire.chat import check_num_calls
from scorepool.wire.request_fields import MAX_NUM_TOKENS, TemplateKwargs, TopLogprobs

MaxTokens = Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)]
_NAMES = {
    "chat_template_kwargs.reasoning_effort": "reasoning_effort",
    "allowed_tools": "tool_choice",
    "targets": "logprob_token_ids",
}
_IMAGE = re.compile(r"(messages\[\d+\])\.images\[\d+\]")
# The one value that is supported, by field.
_SUPPORTED = {
    "store": False,
    "echo": False,
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Answer a chat. A field that is null has its default."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: an answer holds at most one call.")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=16)] | None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None
    store: bool | None = None
    metadata: NoEffect[Metadata] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: NoEffect[Label] | None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: NoEffect[Label] | None = None
    echo: bool | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Only false: the template writes BOS.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="null is true: special tokens that separate no channels are in no channel.")]
        | None
    ) = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_supported(self, _SUPPORTED)
        check_num_calls(len(message.tool_calls or ()) for message in self.messages)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`: give one of them")
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("`reasoning_effort` is in `chat_template_kwargs` too: give one of them")
        if self.max_new_tokens is not None and (self.min_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"`min_tokens` must be at most `max_completion_tokens`, {self.max_new_tokens}")
        if self.tool_choice not in (None, "auto", "none") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`")
        offered = {tool.function.name for tool in self.tools or ()}
        for name in allowed_tool_names(self.tool_choice):
            if name not in offered:
                raise ValueError(f"`tool_choice` names {wire.quote(name)}, which is none of the `tools`")

        if self.truncation_side == "right" and self.truncate_prompt_tokens is not None:
            raise ValueError("`truncation_side` right would cut the place of the answer; expected left or null")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("`prompt_logprobs` cannot be streamed")

    @property
    def has_token_logprobs(self) -> bool:
        """True if the reply has the logprobs of generated tokens."""
        return bool(self.logprobs)

    @property
    def has_logprobs(self) -> bool:
        """True if the reply has logprobs."""
        return self.has_token_logprobs or self.prompt_logprobs is not None

    @property
    def max_new_tokens(self) -> int | None:
        """Return how many tokens an answer may have; None: what fits, at most 4096."""
        return self.max_completion_tokens or self.max_tokens


def to_request(body: ChatRequest, timeout_s: int) -> wire.Generate:
    """Build the job of a chat, which may run for `timeout_s`."""
    return wire.Generate(
        **sampling_fields(body, timeout_s),
        messages=[message.to_wire() for message in body.messages],
        tools=[tool.to_wire() for tool in body.tools or ()],
        tool_choice=tool_choice_mode(body.tool_choice),
        allowed_tools=allowed_tool_names(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedToolChoice),
        chat_template_kwargs=_template_kwargs(body),
        **body.form_fields,
        **body.truncation_fields,
        max_tokens=body.max_new_tokens,
        skip_special_tokens=False if body.skip_special_tokens is False else None,
        n=body.num_choices,
        logprobs=body.has_logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        top_logprobs=most_top(0 if body.logprob_token_ids else body.top_logprobs or 0, body.prompt_logprobs or 0),
        rank=body.prompt_logprobs is not None,
    )


def field_name(body: ChatRequest, field: str) -> str:
    """Map a field of the job to a field of the body."""
    return _IMAGE.sub(r"\1.content", map_field(_NAMES | body.field_names)(field))


def _template_kwargs(body: ChatRequest) -> TemplateKwargs:
    """Return the template's variables. `reasoning_effort` is the variable of that name, as in vLLM."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**(body.chat_template_kwargs or {}), **effort}
