"""Declare the endpoints of OpenAI's dialect. Pure.

To add one that batches may use too, list it in LINE_ENDPOINTS of batch.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.openai import (
    chat,
    completions,
    continued_responses,
    embeddings,
    foreign_fields,
    input_tokens,
    responses,
    responses_kept,
)
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.api.dialects.openai.chat_reply import ChatChunk, ChatChunkWriter, ChatCompletion, to_chat_completion
from scorepool.api.dialects.openai.completion_reply import (
    Completion,
    CompletionChunk,
    CompletionChunkWriter,
    to_completion,
)
from scorepool.api.dialects.openai.completions import CompletionRequest
from scorepool.api.dialects.openai.embeddings import EmbeddingList, EmbeddingsRequest
from scorepool.api.dialects.openai.input_tokens import InputTokens, InputTokensRequest
from scorepool.api.dialects.openai.response_object import ResponseEvent, ResponseObject
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses_reply import ResponseWriter, to_response
from scorepool.api.dialects.openai.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    to_detokenize_reply,
    to_tokenize_reply,
)
from scorepool.api.dialects.protocol import Context, Endpoint, EventWriter, JobCount, KeptEvents, Previous
from scorepool.api.dialects.top_cap import clamp_fields


class CompletionsEndpoint(Endpoint[CompletionRequest]):
    name = "complete"
    path = "/v1/completions"
    summary = "Complete prompts"
    description = "A client that disconnects cancels its jobs. With `stream`: CompletionChunks as server-sent events."
    example: ClassVar = {"model": "demo", "prompt": "import", "max_tokens": 8, "logprobs": 5}
    body_type = CompletionRequest
    reply_type = Completion
    chunk_type = CompletionChunk
    foreign_fields = foreign_fields.COMPLETIONS

    def job_count(self, body: CompletionRequest) -> JobCount:
        return JobCount(len(body.prompts) * (2 if body.echoes_in_stream else 1), "prompt", "prompts")

    def to_requests(self, body: CompletionRequest, context: Context) -> Iterable[wire.Request]:
        return completions.to_requests(body, context.timeout_s)

    def to_reply(self, body: CompletionRequest, results: Sequence[wire.Result], context: Context) -> Completion:
        reply = to_completion(body, results, f"cmpl-{context.unique_id}", context.created)
        return replace(reply, max_top_logprobs=context.max_top_logprobs)

    def clamp_top_logprobs(self, body: CompletionRequest, cap: int) -> CompletionRequest:
        return clamp_fields(body, cap, "prompt_logprobs", *(["logprobs"] if body.reports_top else []))

    def is_streamed(self, body: CompletionRequest) -> bool:
        return bool(body.stream)

    def to_events(self, body: CompletionRequest, job_ids: Sequence[str], context: Context) -> CompletionChunkWriter:
        writer = CompletionChunkWriter(body, job_ids, f"cmpl-{context.unique_id}", context.created)
        writer.max_top_logprobs = context.max_top_logprobs
        return writer

    def field_name(self, body: CompletionRequest, field: str) -> str:
        return completions.field_name(body, field)


class ChatEndpoint(Endpoint[ChatRequest]):
    name = "chat"
    path = "/v1/chat/completions"
    summary = "Answer a chat"
    description = "A client that disconnects cancels its jobs. With `stream`: ChatChunks as server-sent events."
    example: ClassVar = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    body_type = ChatRequest
    reply_type = ChatCompletion
    chunk_type = ChatChunk
    foreign_fields = foreign_fields.CHAT

    def to_requests(self, body: ChatRequest, context: Context) -> Sequence[wire.Request]:
        return [chat.to_request(body, context.timeout_s)]

    def to_reply(self, body: ChatRequest, results: Sequence[wire.Result], context: Context) -> ChatCompletion:
        [result] = results
        reply = to_chat_completion(body, result, f"chatcmpl-{context.unique_id}", context.created)
        return replace(reply, max_top_logprobs=context.max_top_logprobs)

    def clamp_top_logprobs(self, body: ChatRequest, cap: int) -> ChatRequest:
        return clamp_fields(body, cap, "prompt_logprobs", *([] if body.logprob_token_ids else ["top_logprobs"]))

    def is_streamed(self, body: ChatRequest) -> bool:
        return bool(body.stream)

    def to_events(self, body: ChatRequest, job_ids: Sequence[str], context: Context) -> ChatChunkWriter:
        writer = ChatChunkWriter(body, job_ids, f"chatcmpl-{context.unique_id}", context.created)
        writer.max_top_logprobs = context.max_top_logprobs
        return writer

    def field_name(self, body: ChatRequest, field: str) -> str:
        return chat.field_name(body, field)


class ResponsesEndpoint(Endpoint[ResponseRequest]):
    name = "respond"
    path = "/v1/responses"
    summary = "Answer a conversation"
    description = (
        "OpenAI's newer route. A response is kept as long as the result of a job, unless `store` is false. A client "
        "that disconnects cancels its job, unless that runs in the background. With `stream`: ResponseEvents as "
        "server-sent events."
    )
    example: ClassVar = {"model": "demo", "input": "Hello", "max_output_tokens": 16}
    body_type = ResponseRequest
    reply_type = ResponseObject
    chunk_type = ResponseEvent
    foreign_fields = foreign_fields.RESPONSES

    def to_requests(self, body: ResponseRequest, context: Context) -> Sequence[wire.Request]:
        return [responses.to_request(body, context.timeout_s)]

    def to_reply(self, body: ResponseRequest, results: Sequence[wire.Result], context: Context) -> ResponseObject:
        [result] = results
        return to_response(body, result, context.unique_id, context.created, is_kept=context.is_kept)

    def clamp_top_logprobs(self, body: ResponseRequest, cap: int) -> ResponseRequest:
        """Clamp `top_logprobs`, which every response shows."""
        return body if body.logprob_token_ids else clamp_fields(body, cap, "top_logprobs")

    def kept_body(self, body: ResponseRequest) -> bytes:
        return responses_kept.kept_body(body)

    def previous_jobs(self, body: ResponseRequest) -> Mapping[str, str]:
        return continued_responses.previous_jobs(body)

    def continued(self, body: ResponseRequest, previous: Mapping[str, Previous]) -> ResponseRequest:
        return continued_responses.continued(body, previous)

    def is_in_background(self, body: ResponseRequest) -> bool:
        return bool(body.background)

    def to_kept_reply(self, body: ResponseRequest, job: wire.Job) -> ResponseObject:
        return responses_kept.to_kept_response(body, job)

    def to_kept_events(self, body: ResponseRequest, job: wire.Job) -> responses_kept.KeptResponseEvents:
        return responses_kept.KeptResponseEvents(body, job)

    def is_streamed(self, body: ResponseRequest) -> bool:
        return bool(body.stream)

    def to_events(self, body: ResponseRequest, job_ids: Sequence[str], context: Context) -> ResponseWriter:
        return ResponseWriter(body, context.unique_id, context.created, is_kept=context.is_kept)

    def to_error_event(self, writer: EventWriter | KeptEvents, reply: object) -> bytes:
        assert isinstance(writer, ResponseWriter | responses_kept.KeptResponseEvents)
        assert isinstance(reply, wire.ErrorReply)
        return writer.error(reply.error)

    def field_name(self, body: ResponseRequest, field: str) -> str:
        return responses.field_name(field)


class InputTokensEndpoint(Endpoint[InputTokensRequest]):
    name = "count_response_tokens"
    path = "/v1/responses/input_tokens"
    summary = "Count the tokens of a response's prompt"
    description = "A worker of the model renders and encodes it, ahead of other jobs: it has the template."
    example: ClassVar = {"model": "demo", "input": "Hello"}
    body_type = InputTokensRequest
    reply_type = InputTokens

    def previous_jobs(self, body: InputTokensRequest) -> Mapping[str, str]:
        return continued_responses.previous_jobs(body.response)

    def continued(self, body: InputTokensRequest, previous: Mapping[str, Previous]) -> InputTokensRequest:
        return replace(body, input=continued_responses.continued(body.response, previous).input)

    def to_requests(self, body: InputTokensRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        return [input_tokens.to_request(body.response, context.served_model.id, context.timeout_s)]

    def to_reply(self, body: InputTokensRequest, results: Sequence[wire.Result], context: Context) -> InputTokens:
        [result] = results
        return InputTokens(input_tokens=len(result.sequences[0].token_ids))

    def field_name(self, body: InputTokensRequest, field: str) -> str:
        return responses.field_name(field)


class EmbeddingsEndpoint(Endpoint[EmbeddingsRequest]):
    name = "embed"
    path = "/v1/embeddings"
    summary = "Embed texts"
    description = "The final hidden states of a language model, pooled and normalised: see embed jobs."
    example: ClassVar = {"model": "demo", "input": ["import os", "import sys"]}
    body_type = EmbeddingsRequest
    reply_type = EmbeddingList
    foreign_fields = foreign_fields.EMBEDDINGS
    has_large_replies = True

    def to_requests(self, body: EmbeddingsRequest, context: Context) -> Sequence[wire.Request]:
        return [embeddings.to_request(body, context.timeout_s)]

    def to_reply(self, body: EmbeddingsRequest, results: Sequence[wire.Result], context: Context) -> EmbeddingList:
        [result] = results
        return embeddings.to_embeddings(body, result)

    def field_name(self, body: EmbeddingsRequest, field: str) -> str:
        return embeddings.field_name(body, field)


class TokenizeEndpoint(Endpoint[TokenizeRequest]):
    name = "tokenize"
    path = "/tokenize"
    summary = "Text or a chat to token ids"
    tag = "tokens"
    description = "A worker of the model encodes the text, ahead of other jobs: it has the tokenizer."
    example: ClassVar = {"model": "demo", "prompt": "import os"}
    body_type = TokenizeRequest
    reply_type = TokenizeReply
    foreign_fields = foreign_fields.TOKENIZE

    def to_requests(self, body: TokenizeRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        return [
            wire.Tokenize(
                model=context.served_model.id,
                prompt=body.prompt,
                messages=None if body.messages is None else [message.to_wire() for message in body.messages],
                tools=[tool.to_wire() for tool in body.tools or ()],
                chat_template_kwargs=body.chat_template_kwargs or {},
                add_bos=body.add_special_tokens is not False,
                priority="high",
                timeout_s=context.timeout_s,
            )
        ]

    def to_reply(self, body: TokenizeRequest, results: Sequence[wire.Result], context: Context) -> TokenizeReply:
        assert context.served_model is not None
        [result] = results
        return to_tokenize_reply(result, context.served_model.context_length, bool(body.return_token_strs))


class DetokenizeEndpoint(Endpoint[DetokenizeRequest]):
    name = "detokenize"
    path = "/detokenize"
    summary = "Token ids to text"
    tag = "tokens"
    description = "Bytes that are not UTF-8 become U+FFFD."
    example: ClassVar = {"model": "demo", "tokens": [1, 2]}
    body_type = DetokenizeRequest
    reply_type = DetokenizeReply

    def to_requests(self, body: DetokenizeRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        model, timeout_s = context.served_model.id, context.timeout_s
        return [wire.Tokenize(model=model, prompt=body.tokens, priority="high", timeout_s=timeout_s)]

    def to_reply(self, body: DetokenizeRequest, results: Sequence[wire.Result], context: Context) -> DetokenizeReply:
        [result] = results
        return to_detokenize_reply(result)

    def field_name(self, body: DetokenizeRequest, field: str) -> str:
        return field.replace("prompt", "tokens", 1) if field.startswith("prompt") else field


COMPLETIONS = CompletionsEndpoint()
CHAT = ChatEndpoint()
RESPONSES = ResponsesEndpoint()
INPUT_TOKENS = InputTokensEndpoint()
EMBEDDINGS = EmbeddingsEndpoint()
TOKENIZE = TokenizeEndpoint()
DETOKENIZE = DetokenizeEndpoint()
