"""Declare the endpoints of text-generation-inference's API. Pure."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from scorepool import wire
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.dialects.tgi.generate import TextGenerationRequest, field_name, to_request
from scorepool.api.dialects.tgi.reply import TextGeneration, TextGenerationEvent, TokenEventWriter, to_reply


class TextGenerationEndpoint(Endpoint[TextGenerationRequest]):
    """Take the bodies of `/generate` that are text-generation-inference's: see api/dialects/generate_route.py."""

    name = "generate_text"
    path = "/generate"
    summary = "Continue a text"
    description = "The reply is whole. With `details`: its tokens with their logprobs."
    example: ClassVar = {"inputs": "import", "parameters": {"max_new_tokens": 8, "details": True}}
    body_type = TextGenerationRequest
    reply_type: ClassVar[Any] = TextGeneration

    def error_form(self, body: bytes, message_format: wire.Format) -> Literal["tgi"]:
        return "tgi"

    def to_requests(self, body: TextGenerationRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        stream = self.is_streamed(body)
        return [to_request(body, context.served_model.id, context.timeout_s, stream=stream)]

    def to_reply(self, body: TextGenerationRequest, results: Sequence[wire.Result], context: Context) -> object:
        [result] = results
        return to_reply(body, result)

    def to_events(self, body: TextGenerationRequest, job_ids: Sequence[str], context: Context) -> TokenEventWriter:
        return TokenEventWriter(body)

    def field_name(self, body: TextGenerationRequest, field: str) -> str:
        return field_name(field)


class GenerateStreamEndpoint(TextGenerationEndpoint):
    name = "generate_text_stream"
    path = "/generate_stream"
    summary = "Continue a text, token by token"
    reply_type = None
    description = "Server-sent events, one per token; the last one has the whole text and its `details`."
    chunk_type = TextGenerationEvent

    def is_streamed(self, body: TextGenerationRequest) -> bool:
        return True


class RootEndpoint(TextGenerationEndpoint):
    name = "generate_text_at_root"
    path = "/"
    summary = "Continue a text, as Hugging Face's clients ask"
    description = "The reply is a list of one generation. With `stream`: the events of `/generate_stream`."
    reply_type = list[TextGeneration]
    chunk_type = TextGenerationEvent

    def to_reply(self, body: TextGenerationRequest, results: Sequence[wire.Result], context: Context) -> object:
        return [super().to_reply(body, results, context)]

    def is_streamed(self, body: TextGenerationRequest) -> bool:
        return bool(body.stream)


GENERATE_TEXT, GENERATE_STREAM, ROOT = TextGenerationEndpoint(), GenerateStreamEndpoint(), RootEndpoint()
