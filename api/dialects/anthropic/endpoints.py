"""Declare the endpoints of Anthropic's dialect. Pure."""

from collections.abc import Sequence
from typing import ClassVar

from scorepool import wire
from scorepool.api.dialects.anthropic import messages
from scorepool.api.dialects.anthropic.messages import FOREIGN_FIELDS, CountTokensRequest, MessagesRequest
from scorepool.api.dialects.anthropic.reply import MessageEvent, MessageReply, MessageWriter, TokenCount, to_message
from scorepool.api.dialects.protocol import Context, Endpoint


class MessagesEndpoint(Endpoint[MessagesRequest]):
    name = "message"
    path = "/v1/messages"
    summary = "Answer a conversation, as Anthropic's API does"
    description = "A client that disconnects cancels its job. With `stream`: MessageEvents as server-sent events."
    example: ClassVar = {"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
    body_type = MessagesRequest
    reply_type = MessageReply
    chunk_type = MessageEvent
    foreign_fields = FOREIGN_FIELDS

    def to_requests(self, body: MessagesRequest, context: Context) -> Sequence[wire.Request]:
        return [messages.to_request(body, context.timeout_s)]

    def to_reply(self, body: MessagesRequest, results: Sequence[wire.Result], context: Context) -> MessageReply:
        [result] = results
        return to_message(body, result, context.unique_id)

    def is_streamed(self, body: MessagesRequest) -> bool:
        return bool(body.stream)

    def to_events(self, body: MessagesRequest, job_ids: Sequence[str], context: Context) -> MessageWriter:
        return MessageWriter(body, context.unique_id)

    def field_name(self, body: MessagesRequest, field: str) -> str:
        return messages.field_name(body, field)


class CountTokensEndpoint(Endpoint[CountTokensRequest]):
    name = "count_tokens"
    path = "/v1/messages/count_tokens"
    summary = "Count the tokens of a conversation"
    description = "A worker of the model renders and encodes it, ahead of other jobs: it has the template."
    example: ClassVar = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    body_type = CountTokensRequest
    reply_type = TokenCount
    foreign_fields = FOREIGN_FIELDS

    def to_requests(self, body: CountTokensRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        return [messages.to_count_request(body, context.served_model.id, context.timeout_s)]

    def to_reply(self, body: CountTokensRequest, results: Sequence[wire.Result], context: Context) -> TokenCount:
        [result] = results
        return TokenCount(input_tokens=len(result.sequences[0].token_ids))

    def field_name(self, body: CountTokensRequest, field: str) -> str:
        return messages.field_name(body, field)


MESSAGES = MessagesEndpoint()
COUNT_TOKENS = CountTokensEndpoint()
