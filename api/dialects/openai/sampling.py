"""Define the request fields and reply fields that chat and completions share. Pure."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.detokenizer import target_tokens, top_tokens
from scorepool.api.dialects.priority import PriorityNumber, to_priority
from scorepool.api.dialects.top_k import SampledTopK, to_top_k
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.columns import LogprobsMode
from scorepool.wire.generate import check_specprefill, check_speculation
from scorepool.wire.request_fields import (
    MAX_SEED,
    MAX_SHOWN_TARGETS,
    WHOLE_VOCABULARY,
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    ChosenSpeculation,
    IfWeights,
    KeepPct,
    LogitBias,
    MinP,
    ModelName,
    MostProposedTokens,
    NumChoices,
    NumTokens,
    Penalty,
    RepetitionPenalty,
    Speculation,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    TokenId,
    TopP,
)

T = TypeVar("T")
NoEffect = Annotated[T, Meta(description="Has no effect here.")]
Label = Annotated[str, Meta(max_length=1024)]  # that the client gives to whom or to what it serves


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose which chunks of a stream have the usage."""

    include_usage: Annotated[bool, Meta(description="The usage in a last chunk without choices.")] | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: (
        Annotated[bool, Meta(description="The usage so far in every chunk, unless `include_usage` is false.")] | None
    ) = None

    def __post_init__(self) -> None:
        check_supported(self, {"include_obfuscation": False})

    @property
    def wants_usage(self) -> bool:
        """True if a last chunk has the usage."""
        return bool(self.continuous_usage_stats if self.include_usage is None else self.include_usage)


class SamplingParameters(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample, as vLLM names it. A field that is null has its default."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: SampledTopK | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=MAX_SEED)] | None = None
    stop: StopString | StopStrings | None = None
    n: NumChoices | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logprobs_mode: (
        Annotated[
            LogprobsMode,
            Meta(
                description="An addition. raw_logprobs: of the model's own distribution. processed_logprobs: "
                "`temperature` divides the logits of the prompt, and generated tokens have the logprobs of the "
                "distribution that they are sampled from. null: the server's default, SCOREPOOL_LOGPROBS_MODE."
            ),
        ]
        | None
    ) = None
    logprob_token_ids: (
        Annotated[
            list[TokenId],
            Meta(
                max_length=MAX_SHOWN_TARGETS,
                description="Token ids to report at each generated token, in place of the most likely ones. Needs "
                "`logprobs`.",
            ),
        ]
        | None
    ) = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: NumTokens | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    spaces_between_special_tokens: NoEffect[bool] | None = None
    speculation: ChosenSpeculation | None = None
    speculation_tokens: MostProposedTokens | None = None

    def __post_init__(self) -> None:
        check_speculation(self.speculation, self.speculation_tokens, include_draft_logprobs=False)
        if self.logprob_token_ids and not self.has_token_logprobs:
            raise ValueError("`logprob_token_ids` needs `logprobs`")

    @property
    def num_choices(self) -> int:
        """Return the number of choices per prompt."""
        return self.n or 1

    @property
    def has_token_logprobs(self) -> bool:
        """True if the reply has the logprobs of generated tokens."""
        raise NotImplementedError

    @property
    def has_logprobs(self) -> bool:
        """True if the reply has logprobs."""
        return self.has_token_logprobs


# Fields of some bodies that report the prompt's logprobs, or what the draft model proposed after all of it.
_NEEDS_WHOLE_PROMPT = ("echo", "prompt_logprobs", "include_draft_logprobs")


class SamplingRequest(SamplingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose a model and how to sample from it. A field that is null has its default.

    An unknown field is refused by its name, and so is another value of a field of which one value is supported.
    """

    model: ModelName
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprobs_switch: ClassVar[str] = "`logprobs`"  # what asks for the logprobs of tokens
    include_draft_logprobs: (
        Annotated[
            bool,
            Meta(
                description="An addition. Report each token that speculation proposed: see `draft_logprobs` of the "
                "choices. Needs `logprobs` and a model that is served with speculation."
            ),
        ]
        | None
    ) = None
    specprefill: (
        Annotated[
            bool,
            Meta(
                description="An addition. Sparse prefill, an approximation: of a long prompt, only the tokens that the "
                "worker's draft model attends to go through the model. The usage says how many."
            ),
        ]
        | None
    ) = None
    specprefill_keep_pct: (
        Annotated[
            KeepPct,
            Meta(description="An addition. Percent of the prompt's tokens that are kept, about. null: 20."),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: NoEffect[Label] | None = None
    cache_salt: CacheSalt = None
    priority: PriorityNumber = None
    if_weights: IfWeights = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_supported(self, {"use_beam_search": False, "length_penalty": 1.0})  # vLLM's clients send the defaults
        check_stream_options(self.stream_options, self.stream)
        if self.include_draft_logprobs and not self.has_token_logprobs:
            raise ValueError(f"`include_draft_logprobs` needs {self.logprobs_switch}")
        check_speculation(self.speculation, self.speculation_tokens, bool(self.include_draft_logprobs))
        given = {name: getattr(self, name, None) for name in _NEEDS_WHOLE_PROMPT}  # 0 logprobs are those of the tokens
        beside = [name for name, value in given.items() if value is not None and value is not False]
        check_specprefill(
            bool(self.specprefill), self.specprefill_keep_pct, self.speculation, self.speculation_tokens, beside
        )


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Check that options of a stream come with one; raise ValueError."""
    if options is not None and not stream:
        raise ValueError("`stream_options` needs `stream`: true")


class SamplingFields(wire.SamplingOptions):
    """Type the fields of a wire.Generate that `sampling_options` sets."""

    logprobs_mode: LogprobsMode | None
    targets: list[int] | None
    target_bytes: bool
    speculation: Speculation | None
    speculation_tokens: int | None


class JobFields(SamplingFields):
    """Type those that `sampling_fields` sets."""

    model: str
    timeout_s: int
    stream: bool
    cache_salt: str | None
    priority: wire.Priority
    if_weights: int | None
    include_draft_logprobs: bool
    specprefill: bool
    specprefill_keep_pct: float | None


def sampling_fields(body: SamplingRequest, timeout_s: int) -> JobFields:
    """Return the fields of a body's jobs that chat and completions share, with defaults in place of null."""
    return JobFields(
        model=body.model,
        timeout_s=timeout_s,
        stream=bool(body.stream),
        cache_salt=body.cache_salt,
        priority=to_priority(body.priority),
        if_weights=body.if_weights,
        include_draft_logprobs=bool(body.include_draft_logprobs),
        specprefill=bool(body.specprefill),
        specprefill_keep_pct=body.specprefill_keep_pct,
        **sampling_options(body),
    )


def sampling_options(params: SamplingParameters) -> SamplingFields:
    """Return the parameters as fields of a wire.Generate, with defaults in place of null."""
    return SamplingFields(
        logprobs_mode=params.logprobs_mode,
        targets=params.logprob_token_ids or None,
        target_bytes=bool(params.logprob_token_ids),
        speculation=params.speculation,
        speculation_tokens=params.speculation_tokens,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_k=to_top_k(params.top_k),
        min_p=params.min_p or 0.0,
        seed=None if params.seed is None else params.seed & MAX_SEED,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words or [],
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        stop=[params.stop] if isinstance(params.stop, str) else params.stop or [],
        stop_token_ids=params.stop_token_ids or [],
        ignore_eos=bool(params.ignore_eos),
        min_tokens=params.min_tokens or 0,
        include_stop_str_in_output=bool(params.include_stop_str_in_output),
    )


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """Count the tokens of reasoning, and those that speculation proposed."""

    reasoning_tokens: Annotated[
        int | UnsetType, Meta(description="Tokens in the channel `reasoning`. Present if the model reasoned.")
    ] = UNSET
    speculation: Annotated[
        Literal["ngram", "draft", "mtp"] | UnsetType, Meta(description="An addition. The source of proposed tokens.")
    ] = UNSET
    speculation_tokens: Annotated[
        int | UnsetType, Meta(description="An addition. Proposed tokens in one step, at most.")
    ] = UNSET
    accepted_prediction_tokens: Annotated[int, Meta(description="They are part of the completion.")]
    rejected_prediction_tokens: Annotated[int, Meta(description="They are not.")]


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Count the prompt tokens that were not computed, and the frames that videos showed."""

    cached_tokens: Annotated[
        int, Meta(description="Tokens of a prefix that was computed before, or of a cached result.")
    ]
    kept_tokens: Annotated[
        int | UnsetType,
        Meta(description="An addition. Tokens that went through the model, with `specprefill`: all of a short prompt."),
    ] = UNSET
    video_frames: Annotated[
        int | UnsetType, Meta(description="An addition. Frames of videos that the prompt shows, if any.")
    ] = UNSET


class CompletionUsage(Struct, frozen=True, kw_only=True):
    """Count the tokens of a request and its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Annotated[
        PromptTokensDetails | UnsetType,
        Meta(description="Present if tokens of the prompt were not computed anew, with `specprefill` and with videos."),
    ] = UNSET
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType,
        Meta(description="Present if the model reasoned, or if speculation could propose tokens."),
    ] = UNSET


StopReason = Annotated[
    int | str | None, Meta(description="The item of `stop_token_ids` or `stop`; null: the model's own end token.")
]
LastStopReason = Annotated[
    int | str | UnsetType | None, Meta(description="The `stop_reason` of the choice, in its last chunk.")
]
ModeIfLogprobs = Annotated[
    LogprobsMode | UnsetType, Meta(description="The mode of the logprobs. Present if there are any.")
]
LastFingerprint = Annotated[
    str | UnsetType, Meta(description="The fingerprint of what computed the choice, in its last chunk.")
]
LastModeIfLogprobs = Annotated[
    LogprobsMode | UnsetType, Meta(description="The mode of the logprobs, in the last chunk of a choice.")
]
DraftLogprobsIfAsked = Annotated[
    list[wire.DraftLogprob] | UnsetType,
    Meta(description="Present with `include_draft_logprobs`: one entry per token that speculation proposed."),
]
LastDraftLogprobs = Annotated[
    list[wire.DraftLogprob] | UnsetType,
    Meta(description="Present with `include_draft_logprobs`, in the last chunk of a choice."),
]
TokenIdsIfAsked = Annotated[list[int] | UnsetType, Meta(description="Present with `return_token_ids`.")]
LastPromptTokenIds = Annotated[
    list[int] | UnsetType, Meta(description="Present with `return_token_ids`, in the last chunk of a choice.")
]
ChunkUsage = Annotated[
    CompletionUsage | UnsetType | None,
    Meta(
        description="Present with `include_usage`: null in every chunk but the last, which has no choices. With "
        "`continuous_usage_stats`: the usage so far in every chunk."
    ),
]


def reported_tokens(
    sequence: wire.SequenceResult, entry: int, target_ids: list[int] | None, num_top: int
) -> list[tuple[int, bytes, float | None]]:
    """Return what is reported beside a token: the targets, or the most likely tokens if there are no targets."""
    if target_ids:
        return target_tokens(sequence, entry, target_ids)
    return top_tokens(sequence, entry)[: None if num_top == WHOLE_VOCABULARY else num_top]


def usage_of_results(results: Sequence[wire.Result]) -> CompletionUsage:
    """Add up the usage of a request's jobs."""
    return to_usage(
        sum(result.usage.prompt_tokens for result in results),
        sum(result.usage.completion_tokens for result in results),
        [result.usage for result in results],
        sum(sequence.num_reasoning_tokens for result in results for sequence in result.sequences),
    )


def to_usage(
    prompt_tokens: int, completion_tokens: int, ended: Iterable[wire.Usage] = (), reasoning_tokens: int = 0
) -> CompletionUsage:
    """Build the usage of these numbers of tokens, and of what was cached and proposed in the jobs that have ended."""
    accepted = proposed = cached = most = frames = 0
    kept: int | UnsetType = UNSET
    method: Literal["ngram", "draft", "mtp"] | UnsetType = UNSET
    for usage in ended:
        method, most = usage.speculation or method, max(most, usage.speculation_tokens)
        cached, frames = cached + usage.cached_tokens, frames + usage.video_frames
        if usage.kept_tokens is not None:
            kept = (kept or 0) + usage.kept_tokens
        accepted, proposed = accepted + usage.accepted_tokens, proposed + usage.proposed_tokens
    details = CompletionTokensDetails(
        reasoning_tokens=reasoning_tokens or UNSET,
        speculation=method,
        speculation_tokens=most or UNSET,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=proposed - accepted,
    )
    has_details = cached or frames or kept is not UNSET
    of_prompt = PromptTokensDetails(cached_tokens=cached, kept_tokens=kept, video_frames=frames or UNSET)
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=of_prompt if has_details else UNSET,
        completion_tokens_details=details if method is not UNSET or reasoning_tokens else UNSET,
    )


def fingerprint_of_results(results: Sequence[wire.Result]) -> str:
    """Return the fingerprint of the first result, or of the first approximate one, so that it marks the reply."""
    stamps = [result.stamp for result in results]
    return system_fingerprint(next((stamp for stamp in stamps if stamp.approximate), stamps[0]))


def system_fingerprint(stamp: wire.Provenance) -> str:
    """Return a fingerprint that is equal for equal weights, dtype and versions: then a seed gives the same answer."""
    computed_by = replace(stamp, verification=None, cached=False, cached_items=0)
    return f"fp_{hashlib.blake2b(wire.encode(computed_by), digest_size=8).hexdigest()}"
