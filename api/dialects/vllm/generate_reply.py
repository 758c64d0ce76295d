"""Build the replies of `/inference/v1/generate`: one choice per sequence of the result, whole or in chunks. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.deltas import Delta, columns_from
from scorepool.api.dialects.detokenizer import generated_text, token_text
from scorepool.api.dialects.openai.chunks import ChunkWriter
from scorepool.api.dialects.openai.prompt_logprobs import PromptLogprob, to_prompt_logprobs
from scorepool.api.dialects.openai.sampling import (
    ChunkUsage,
    CompletionUsage,
    LastFingerprint,
    LastModeIfLogprobs,
    LastStopReason,
    ModeIfLogprobs,
    StopReason,
    TokenIdsIfAsked,
    reported_tokens,
    system_fingerprint,
    usage_of_results,
)
from scorepool.api.dialects.top_cap import MaxTopLogprobsIfClamped
from scorepool.api.dialects.vllm.generate import GenerateTokensRequest
from scorepool.api.dialects.weights import LastWeightsVersion, WeightsVersion, weights_version

OutputMode = Annotated[Literal["tokens", "text"], Meta(description="The request's `output_mode`.")]
TextIfAsked = Annotated[str | UnsetType, Meta(description="Present with `output_mode` `text`.")]


class TokenIdLogprob(Struct, frozen=True, kw_only=True):
    """Report a token. `token` is `token_id:5`, or its text with `output_mode` `text`."""

    token_id: int
    token: str
    logprob: float


class GeneratedToken(TokenIdLogprob, frozen=True, kw_only=True):
    """Report a generated token."""

    top_logprobs: Annotated[
        list[TokenIdLogprob],
        Meta(
            description="The token itself, then the other most likely ones, most likely first, or those of "
            "`logprob_token_ids` in their order."
        ),
    ]


class ChoiceLogprobs(Struct, frozen=True, kw_only=True):
    """Report the tokens of a choice."""

    content: list[GeneratedToken]


class TokensChoice(Struct, frozen=True, kw_only=True):
    """Give one of `n` continuations."""

    index: int
    token_ids: list[int]
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    text: TextIfAsked = UNSET


class GeneratedTokens(Struct, frozen=True, kw_only=True):
    """Answer with continuations."""

    request_id: Annotated[str, Meta(description="The request's, or a random one.")]
    created: int
    model: str
    output_mode: OutputMode
    choices: list[TokensChoice]
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprob] | None] | None,
        Meta(description="One entry per token of the prompt, by token id, its own first. null if not asked for."),
    ]
    usage: CompletionUsage
    system_fingerprint: str
    logprobs_mode: ModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: WeightsVersion = UNSET
    prompt_token_ids: TokenIdsIfAsked = UNSET


class TokensChoiceChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of one of `n` continuations."""

    index: int
    token_ids: list[int]
    logprobs: ChoiceLogprobs | None
    finish_reason: Annotated[
        Literal["stop", "length"] | None, Meta(description="null until the last chunk of the choice.")
    ]
    stop_reason: LastStopReason = UNSET
    text: TextIfAsked = UNSET


class GeneratedTokensChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of the continuations."""

    request_id: str
    output_mode: OutputMode
    choices: list[TokensChoiceChunk]
    usage: ChunkUsage = UNSET
    system_fingerprint: LastFingerprint = UNSET
    logprobs_mode: LastModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: LastWeightsVersion = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, Meta(description="Present with `return_token_ids`, in the last chunk of a choice.")
    ] = UNSET


def to_reply(
    body: GenerateTokensRequest, result: wire.Result, request_id: str, model: str, created: int
) -> GeneratedTokens:
    """Build the reply. `created` is in unix s."""
    prompt_logprobs, k = None, body.sampling_params.prompt_logprobs
    if k is not None:
        prompt_logprobs = to_prompt_logprobs(result.sequences[0], k)
    return GeneratedTokens(
        request_id=request_id,
        created=created,
        model=model,
        output_mode=body.output_mode or "tokens",
        choices=[_to_choice(body, sequence, index) for index, sequence in enumerate(result.sequences)],
        prompt_logprobs=prompt_logprobs,
        usage=usage_of_results([result]),
        system_fingerprint=system_fingerprint(result.stamp),
        logprobs_mode=result.logprobs_mode if body.has_logprobs else UNSET,
        weights_version=weights_version([result], body.if_weights),
        prompt_token_ids=_prompt_ids(body, result.sequences[0].prompt_token_ids) if body.return_token_ids else UNSET,
    )


def _prompt_ids(body: GenerateTokensRequest, kept: list[int] | None) -> list[int]:
    """Return the tokens of the prompt: those that the job reports if it may have cut them."""
    return body.token_ids if kept is None else kept


class TokensChunkWriter(ChunkWriter[GeneratedTokensChunk]):
    """Translate the events of the job to chunks."""

    def __init__(self, body: GenerateTokensRequest, job_ids: Sequence[str], request_id: str, created: int) -> None:
        super().__init__(body, job_ids, created)
        self._body = body
        self._request_id = request_id

    def opening(self) -> list[GeneratedTokensChunk]:
        return []

    def to_chunk(self, delta: Delta) -> GeneratedTokensChunk:
        body = self._body
        choice = TokensChoiceChunk(
            index=delta.index,
            token_ids=delta.sequence.token_ids,
            logprobs=_to_logprobs(body, delta.sequence),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            text=delta.text if body.has_text else UNSET,
        )
        is_asked = body.return_token_ids and delta.finish_reason
        return self._chunk([choice], _prompt_ids(body, delta.prompt_token_ids) if is_asked else UNSET)

    def usage_chunk(self) -> GeneratedTokensChunk:
        return self._chunk([])

    def _chunk(
        self, choices: list[TokensChoiceChunk], prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> GeneratedTokensChunk:
        return GeneratedTokensChunk(
            request_id=self._request_id,
            output_mode=self._body.output_mode or "tokens",
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )


def _to_choice(body: GenerateTokensRequest, sequence: wire.SequenceResult, index: int) -> TokensChoice:
    generated = columns_from(sequence, sequence.num_reported_prompt_tokens)
    return TokensChoice(
        index=index,
        token_ids=generated.token_ids,
        logprobs=_to_logprobs(body, generated),
        finish_reason=sequence.finish_reason or "length",
        stop_reason=sequence.stop_reason,
        text=generated_text(sequence) if body.has_text else UNSET,
    )


def _to_logprobs(body: GenerateTokensRequest, generated: wire.SequenceResult) -> ChoiceLogprobs | None:
    params, as_ids = body.sampling_params, not body.has_text
    if params.logprobs is None:
        return None
    assert generated.logprobs is not None
    columns = zip(generated.token_ids, generated.token_bytes, generated.logprobs.values(), strict=True)
    content = []
    for entry, (token_id, token_bytes, logprob) in enumerate(columns):
        assert logprob is not None
        token = token_text(token_id, token_bytes, as_ids)
        own = TokenIdLogprob(token_id=token_id, token=token, logprob=logprob)
        others = [
            TokenIdLogprob(token_id=top_id, token=token_text(top_id, top_bytes, as_ids), logprob=value)
            for top_id, top_bytes, value in reported_tokens(generated, entry, params.logprob_token_ids, params.logprobs)
            if top_id != token_id and value is not None
        ]
        content.append(GeneratedToken(token_id=token_id, token=token, logprob=logprob, top_logprobs=[own, *others]))
    return ChoiceLogprobs(content=content)
