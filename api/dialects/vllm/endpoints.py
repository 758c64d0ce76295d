"""Declare the endpoints of vLLM's dialect. Pure."""

from collections.abc import Sequence
from typing import ClassVar

from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.dialects.top_cap import clamp_fields
from scorepool.api.dialects.vllm import foreign_fields
from scorepool.api.dialects.vllm.generate import GenerateTokensRequest, field_name, to_request
from scorepool.api.dialects.vllm.generate_reply import (
    GeneratedTokens,
    GeneratedTokensChunk,
    TokensChunkWriter,
    to_reply,
)


class GenerateTokensEndpoint(Endpoint[GenerateTokensRequest]):
    name = "generate_tokens"
    path = "/inference/v1/generate"
    summary = "Continue token ids"
    description = (
        "A client that disconnects cancels its job, unless it gave a `request_id`: then the job goes on, and the same "
        "body gets its answer (another body: 409). With `stream`: GeneratedTokensChunks as server-sent events."
    )
    example: ClassVar = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "logprobs": 1}}
    body_type = GenerateTokensRequest
    reply_type = GeneratedTokens
    chunk_type = GeneratedTokensChunk
    foreign_fields = foreign_fields.GENERATE

    def to_requests(self, body: GenerateTokensRequest, context: Context) -> Sequence[wire.Request]:
        assert context.served_model is not None
        return [to_request(body, context.served_model.id, context.timeout_s)]

    def to_reply(
        self, body: GenerateTokensRequest, results: Sequence[wire.Result], context: Context
    ) -> GeneratedTokens:
        assert context.served_model is not None
        [result] = results
        model = body.model or context.served_model.id
        reply = to_reply(body, result, body.request_id or context.unique_id, model, context.created)
        return replace(reply, max_top_logprobs=context.max_top_logprobs)

    def clamp_top_logprobs(self, body: GenerateTokensRequest, cap: int) -> GenerateTokensRequest:
        names = ["prompt_logprobs", *([] if body.sampling_params.logprob_token_ids else ["logprobs"])]
        params = clamp_fields(body.sampling_params, cap, *names)
        return body if params is body.sampling_params else replace(body, sampling_params=params)

    def idempotency_key(self, body: GenerateTokensRequest) -> str | None:
        return None if body.request_id is None else f"{self.path} {body.request_id}"  # no Idempotency-Key has a space

    def is_streamed(self, body: GenerateTokensRequest) -> bool:
        return bool(body.stream)

    def to_events(self, body: GenerateTokensRequest, job_ids: Sequence[str], context: Context) -> TokensChunkWriter:
        writer = TokensChunkWriter(body, job_ids, body.request_id or context.unique_id, context.created)
        writer.max_top_logprobs = context.max_top_logprobs
        return writer

    def field_name(self, body: GenerateTokensRequest, field: str) -> str:
        return field_name(body, field)


GENERATE = GenerateTokensEndpoint()
