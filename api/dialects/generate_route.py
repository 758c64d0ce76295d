"""Serve `/generate`, which SGLang and text-generation-inference have, the latter with `inputs` in its bodies. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.protocol import Context, Dialect, Endpoint, EventWriter, JobCount
from scorepool.api.dialects.sglang.endpoints import GENERATE
from scorepool.api.dialects.sglang.generate import GenerateRequest
from scorepool.api.dialects.sglang.generate_reply import GenerateReply
from scorepool.api.dialects.tgi.endpoints import GENERATE_TEXT
from scorepool.api.dialects.tgi.generate import TextGenerationRequest
from scorepool.api.dialects.tgi.reply import TextGeneration


class _InputsMark(Struct):
    inputs: Raw | UnsetType = UNSET


class GenerateRouteEndpoint(Endpoint[Any]):
    """Pass each body to the endpoint whose it is."""

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

    def parse(self, body: bytes, message_format: wire.Format = "json") -> Any:
        return (GENERATE_TEXT if _has_inputs(body, message_format) else GENERATE).parse(body, message_format)

    def error_form(self, body: bytes, message_format: wire.Format) -> Literal["tgi"] | None:
        return "tgi" if _has_inputs(body, message_format) else None

    def job_count(self, body: Any) -> JobCount:
        return _endpoint_of(body).job_count(body)

    def to_requests(self, body: Any, context: Context) -> Iterable[wire.Request]:
        return _endpoint_of(body).to_requests(body, context)

    def to_reply(self, body: Any, results: Sequence[wire.Result], context: Context) -> object:
        return _endpoint_of(body).to_reply(body, results, context)

    def clamp_top_logprobs(self, body: Any, cap: int) -> Any:
        return _endpoint_of(body).clamp_top_logprobs(body, cap)

    def is_streamed(self, body: Any) -> bool:
        return _endpoint_of(body).is_streamed(body)

    def to_events(self, body: Any, job_ids: Sequence[str], context: Context) -> EventWriter:
        return _endpoint_of(body).to_events(body, job_ids, context)

    def field_name(self, body: Any, field: str) -> str:
        return _endpoint_of(body).field_name(body, field)


def _has_inputs(body: bytes, message_format: wire.Format) -> bool:
    try:
        return wire.parse(body, _InputsMark, message_format).inputs is not UNSET
    except wire.Invalid:  # the endpoint says what is wrong
        return False


def _endpoint_of(body: object) -> Endpoint[Any]:
    return GENERATE_TEXT if isinstance(body, TextGenerationRequest) else GENERATE


GENERATE_ROUTE = GenerateRouteEndpoint()
DIALECT = Dialect(tag="sglang", endpoints=(GENERATE_ROUTE,), form="openai_or_tgi")
