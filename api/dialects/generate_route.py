"""Serve `/generate`, which SGLang and text-generation-inference have, the latter with `inputs` in its bodies. Pure."""

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.either import EitherEndpoint
from scorepool.api.dialects.protocol import Dialect, Endpoint
from scorepool.api.dialects.sglang.endpoints import GENERATE
from scorepool.api.dialects.sglang.generate import GenerateRequest
from scorepool.api.dialects.sglang.generate_reply import GenerateReply
from scorepool.api.dialects.tgi.endpoints import GENERATE_TEXT
from scorepool.api.dialects.tgi.generate import TextGenerationRequest
from scorepool.api.dialects.tgi.reply import TextGeneration


class _InputsMark(Struct):
    inputs: Raw | UnsetType = UNSET


class GenerateRouteEndpoint(EitherEndpoint):
    name = "generate"
    path = "/generate"
    summary = "Continue prompts"
    description = (
        "SGLang's, with `text` or `input_ids`: the reply is a list if the request has several prompts, or if `n` is "
        "more than 1. With `stream`: outputs as server-sent events, each from its start. Text-generation-inference's, "
        "with `inputs`: one generation."
    )
    example: ClassVar = {"text": "import", "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    reply_type = (GenerateReply, list[GenerateReply], TextGeneration)
    chunk_type = GenerateReply

    @property
    def body_types(self) -> tuple[type, ...]:
        return GenerateRequest, TextGenerationRequest

    def endpoint_for(self, body: bytes, message_format: wire.Format) -> Endpoint[Any]:
        return GENERATE_TEXT if _has_inputs(body, message_format) else GENERATE

    def endpoint_of(self, body: object) -> Endpoint[Any]:
        return GENERATE_TEXT if isinstance(body, TextGenerationRequest) else GENERATE

    def error_form(self, body: bytes, message_format: wire.Format) -> Literal["tgi"] | None:
        return self.endpoint_for(body, message_format).error_form(body, message_format)


def _has_inputs(body: bytes, message_format: wire.Format) -> bool:
    try:
        return wire.parse(body, _InputsMark, message_format).inputs is not UNSET
    except wire.Invalid:  # the endpoint says what is wrong
        return False


GENERATE_ROUTE = GenerateRouteEndpoint()
DIALECT = Dialect(tag="sglang", endpoints=(GENERATE_ROUTE,), form="openai_or_tgi")
