"""Declare the endpoint of ms-swift's dialect. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.deltas import columns_from
from scorepool.api.dialects.detokenizer import generated_text
from scorepool.api.dialects.openai.prompt_logprobs import PromptLogprobs, to_prompt_logprobs
from scorepool.api.dialects.openai.sampling import CompletionUsage, usage_of_results
from scorepool.api.dialects.protocol import Chat, Context, Endpoint, JobCount
from scorepool.api.dialects.swift.infer import InferBody, to_request

REQUEST_FIELD = re.compile(r"\[(?P<index>\d+)\]\.?(?P<path>.*)", re.DOTALL)


class InferMessage(Struct, frozen=True, kw_only=True):
    """Give the generated turn."""

    role: Literal["assistant"] = "assistant"
    content: str


class InferChoice(Struct, frozen=True, kw_only=True):
    """Give what was generated."""

    index: Literal[0] = 0
    message: InferMessage
    finish_reason: Literal["stop", "length"]
    token_ids: Annotated[list[int] | UnsetType, Meta(description="Present with `return_details`.")] = UNSET


class InferUsage(Struct, frozen=True, kw_only=True):
    """Count the tokens of a chat."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InferReply(Struct, frozen=True, kw_only=True):
    """Answer one chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[InferChoice]
    usage: InferUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType,
        Meta(description="The chat through the model's template, and the ids of its last turn. With `return_details`."),
    ] = UNSET


class InferEndpoint(Endpoint[InferBody]):
    name = "swift_infer"
    path = "/infer/"
    other_paths = ("/infer",)
    summary = "Score or continue chats"
    description = (
        "A chat goes through the model's template, and the token ids of its last turn follow unchanged. If one chat "
        "fails, the request fails and names it."
    )
    example: ClassVar = {
        "infer_requests": [
            {"messages": [{"role": "user", "content": "What is blue?"}, {"role": "assistant", "content": [1, 2, 3]}]}
        ],
        "request_config": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
    }
    body_type = InferBody
    reply_type = list[InferReply]
    has_large_replies = True

    def job_count(self, body: InferBody) -> JobCount:
        return JobCount(len(body.infer_requests), "infer_requests", "chats")

    def texts_to_encode(self, body: InferBody, served_model: wire.ServedModel) -> Iterable[Chat]:
        for request in body.infer_requests:
            yield Chat(
                messages=request.text_messages,
                tools=[tool.to_wire() for tool in request.tools or ()],
                chat_template_kwargs=request.chat_template_kwargs or {},
            )

    def to_requests(self, body: InferBody, context: Context) -> Iterator[wire.Request]:
        assert context.served_model is not None
        for request, chat_ids in zip(body.infer_requests, context.encoded_texts, strict=True):
            yield to_request(body, chat_ids + request.response_ids, context.served_model.id, context.timeout_s)

    def to_reply(self, body: InferBody, results: Sequence[wire.Result], context: Context) -> list[InferReply]:
        assert context.served_model is not None
        model = body.model or context.served_model.id
        chats = zip(results, body.infer_requests, context.encoded_texts, strict=True)
        return [
            _to_reply(
                body,
                result,
                chat_ids + request.response_ids,
                f"chatcmpl-{context.unique_id}-{index}",
                model,
                context.created,
            )
            for index, (result, request, chat_ids) in enumerate(chats)
        ]

    def field_name(self, body: InferBody, field: str) -> str:
        found = REQUEST_FIELD.fullmatch(field)
        index, path = (found["index"], found["path"]) if found else ("0", field)
        if path.startswith(("prompt[", "messages", "tools", "chat_template_kwargs")) or path == "prompt":
            return f"infer_requests[{index}].{'messages' if path.startswith('prompt') else path}"
        return f"request_config.{'prompt_logprobs' if path == 'top_logprobs' else path}" if path else "infer_requests"


def _to_reply(
    body: InferBody, result: wire.Result, prompt: list[int], reply_id: str, model: str, created: int
) -> InferReply:
    [sequence] = result.sequences
    config = body.config
    k, has_ids = config.prompt_logprobs, bool(config.return_details)
    usage: CompletionUsage = usage_of_results([result])
    choice = InferChoice(
        message=InferMessage(content=generated_text(sequence)),
        finish_reason=sequence.finish_reason or "length",
        token_ids=columns_from(sequence, sequence.num_reported_prompt_tokens).token_ids if has_ids else UNSET,
    )
    return InferReply(
        id=reply_id,
        created=created,
        model=model,
        choices=[choice],
        usage=InferUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        ),
        prompt_logprobs=UNSET if k is None else to_prompt_logprobs(sequence, k),
        prompt_token_ids=prompt if has_ids else UNSET,
    )


INFER = InferEndpoint()
