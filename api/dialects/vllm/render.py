"""Render a chat to token ids, as a body of `/inference/v1/generate`. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.openai import chat, foreign_fields
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.dialects.unsupported import check_supported

# Fields of a chat that are sampling parameters of the same name.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logit_bias", "stop_token_ids", "min_tokens"),
    *("allowed_token_ids", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "include_stop_str_in_output"),
    *("prompt_logprobs", "logprobs_mode", "logprob_token_ids", "skip_special_tokens"),
    *("speculation", "speculation_tokens"),
)
# The one value that is supported, by field: the reply cannot carry the effect of another.
_SUPPORTED = {
    "truncate_prompt_tokens": None,  # how much is kept depends on the context of the worker that answers
    "parallel_tool_calls": True,
    "include_draft_logprobs": False,
    "specprefill": False,
}


class RenderChatRequest(ChatRequest, frozen=True, kw_only=True):
    """Render a chat. What would change the answer, and is neither a token nor a sampling parameter, is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_supported(self, _SUPPORTED)
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError('`tool_choice` can constrain no answer to a rendered chat, expected "auto" or "none"')
        if self.tool_choice != "none" and any(tool.function.strict for tool in self.tools or ()):
            raise ValueError('`tools` that are strict need `tool_choice` "none": a rendered chat constrains no calls')


class RenderedChat(Struct, frozen=True, kw_only=True):
    """Give the prompt of a chat, its sampling parameters and how its job runs: a body of `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: Annotated[dict[str, Any], Meta(description="Those that the chat sets.")]
    model: str
    features: Annotated[None, Meta(description="There are no images.")] = None
    cache_salt: Annotated[str | UnsetType, Meta(description="The chat's. Absent if it has none.")] = UNSET
    priority: Annotated[int | UnsetType, Meta(description="The chat's. Absent if it has none.")] = UNSET
    if_weights: Annotated[int | UnsetType, Meta(description="The chat's. Absent if it has none.")] = UNSET


class RenderChatEndpoint(Endpoint[RenderChatRequest]):
    name = "render_chat"
    path = "/v1/chat/completions/render"
    summary = "Render a chat to token ids"
    description = (
        "A worker of the model renders and encodes it, ahead of other jobs: it has the template. What the reply cannot "
        "carry is refused: images, `truncate_prompt_tokens` and what constrains tool calls."
    )
    example: ClassVar = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    body_type = RenderChatRequest
    reply_type = RenderedChat
    foreign_fields = foreign_fields.CHAT

    def to_requests(self, body: RenderChatRequest, context: Context) -> Sequence[wire.Request]:
        rendered = chat.to_request(body, context.timeout_s)
        for index, message in enumerate(rendered.messages or ()):
            if message.images:
                raise ValueError(f"`messages[{index}].images[0]` has images, and a rendered chat only token ids")
        return [
            wire.Tokenize(
                model=rendered.model,
                messages=rendered.messages,
                tools=rendered.tools,
                chat_template_kwargs=rendered.chat_template_kwargs,
                priority="high",
                timeout_s=context.timeout_s,
            )
        ]

    def to_reply(self, body: RenderChatRequest, results: Sequence[wire.Result], context: Context) -> RenderedChat:
        [result] = results
        values = {name: getattr(body, name) for name in _SAME} | {"max_tokens": body.max_new_tokens}
        if body.has_token_logprobs:
            values["logprobs"] = body.top_logprobs or 0
        if body.forms:
            names = {"json_schema": "json"}
            values["structured_outputs"] = {names.get(name, name): form for name, form in body.form_fields.items()}
        params = {name: value for name, value in values.items() if value is not None}
        return RenderedChat(
            token_ids=result.sequences[0].token_ids,
            sampling_params=params,
            model=body.model,
            cache_salt=UNSET if body.cache_salt is None else body.cache_salt,
            priority=UNSET if body.priority is None else body.priority,
            if_weights=UNSET if body.if_weights is None else body.if_weights,
        )

    def field_name(self, body: RenderChatRequest, field: str) -> str:
        return chat.field_name(body, field)


RENDER_CHAT = RenderChatEndpoint()
