"""Declare the endpoint of SGLang's `/generate`. Pure."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from scorepool import wire
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.api.dialects.sglang import foreign_fields
from scorepool.api.dialects.sglang.generate import GenerateRequest, field_name, to_requests
from scorepool.api.dialects.sglang.generate_reply import GenerateReply, to_answers
from scorepool.api.dialects.sglang.generate_stream import GenerateWriter
from scorepool.api.dialects.top_cap import clamp_fields


class GenerateEndpoint(Endpoint[GenerateRequest]):
    name = "generate"
    path = "/generate"
    summary = "Continue prompts"
    description = (
        "The reply is a list if the request has several prompts, or if `n` is more than 1. With `stream`: outputs as "
        "server-sent events, each from its start."
    )
    example: ClassVar = {"text": "import", "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    body_type = GenerateRequest
    reply_type = GenerateReply | list[GenerateReply]
    chunk_type = GenerateReply
    foreign_fields = foreign_fields.GENERATE

    def job_count(self, body: GenerateRequest) -> JobCount:
        return JobCount(len(body.prompts), "text" if body.input_ids is None else "input_ids", "prompts")

    def to_requests(self, body: GenerateRequest, context: Context) -> Iterable[wire.Request]:
        assert context.served_model is not None
        return to_requests(body, context.served_model.id, context.timeout_s)

    def to_reply(
        self, body: GenerateRequest, results: Sequence[wire.Result], context: Context
    ) -> GenerateReply | list[GenerateReply]:
        answers = to_answers(body, results, context.unique_id, context.max_top_logprobs)
        return answers if body.is_list else answers[0]

    def is_streamed(self, body: GenerateRequest) -> bool:
        return body.stream

    def to_events(self, body: GenerateRequest, job_ids: Sequence[str], context: Context) -> GenerateWriter:
        writer = GenerateWriter(body, job_ids, context.unique_id)
        writer.max_top_logprobs = context.max_top_logprobs
        return writer

    def clamp_top_logprobs(self, body: GenerateRequest, cap: int) -> GenerateRequest:
        return clamp_fields(body, cap, "top_logprobs_num") if body.return_logprob else body

    def field_name(self, body: GenerateRequest, field: str) -> str:
        return field_name(body, field)


GENERATE = GenerateEndpoint()
