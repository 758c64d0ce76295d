"""Define the request that continues a prompt or answers a chat."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from scorepool.wire.chat import Message, Tool, check_json, check_num_calls
from scorepool.wire.columns import LogprobsMode
from scorepool.wire.image import Images, check_images
from scorepool.wire.quote import quote
from scorepool.wire.request_fields import (
    FORMS,
    MAX_SAMPLED_TOP_K,
    MAX_SHOWN_TARGETS,
    MIN_DIVIDING_TEMPERATURE,
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Choice,
    Grammar,
    KeepPct,
    LogitBias,
    MinP,
    NumChoices,
    NumTokens,
    Packed,
    Penalty,
    Regex,
    RepetitionPenalty,
    Seed,
    Speculation,
    SpeculationTokens,
    StopStrings,
    StopTokenIds,
    TargetIds,
    Temperature,
    TemplateKwargs,
    Text,
    TokenIds,
    TopLogprobs,
    TopP,
    TruncatePrompt,
    TruncateTo,
    UseCache,
    check_truncate_to,
)
from scorepool.wire.submission import Submission

# Their numbers are those of the whole prompt.
_NEEDS_WHOLE_PROMPT = ("prompt_logprobs", "recompute", "include_draft_logprobs")
_NOT_BESIDE_IMAGES = (
    *("prompt_logprobs", "truncate_to", "truncate", "adapter", "specprefill"),
    *("speculation_tokens", "include_draft_logprobs"),  # nothing is proposed
)


class Generate(Submission, tag="generate", frozen=True, kw_only=True):
    """Continue a prompt, or answer a chat, and report the logprob of every token that was sampled."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    images: Images = []
    tools: Annotated[list[Tool], Meta(max_length=128, description="Functions that the answer of a chat may call.")] = []
    tool_choice: Annotated[
        Literal["auto", "none", "required"],
        Meta(
            description="`none`: the model sees the tools, and its calls are returned as content. `required`: after "
            "any reasoning the model calls a tool, in its own format and with arguments that follow the tool's schema."
        ),
    ] = "auto"
    allowed_tools: Annotated[
        list[str], Meta(max_length=128, description="Names of the tools that may be called. Empty: all of them.")
    ] = []
    parallel_tool_calls: Annotated[bool, Meta(description="false: an answer holds at most one call.")] = True
    chat_template_kwargs: TemplateKwargs = {}
    max_tokens: (
        Annotated[NumTokens, Meta(description="0: only report the prompt. null: what fits, at most 4096.")] | None
    ) = 128
    temperature: Annotated[Temperature, Meta(description="0 is greedy.")] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_SAMPLED_TOP_K, description="0 keeps every token.")] = 0
    min_p: MinP = 0.0
    seed: Seed | None = None
    logit_bias: Annotated[LogitBias, Meta(description="Values added to the logits before sampling, by token id.")] = {}
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords = []
    presence_penalty: Annotated[
        Penalty, Meta(description="Subtracted from the logit of every token that was generated before.")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, Meta(description="Subtracted from a token's logit once for each time it was generated.")
    ] = 0.0
    repetition_penalty: Annotated[
        RepetitionPenalty,
        Meta(description="Divides positive logits and multiplies negative ones, of tokens in the prompt or generated."),
    ] = 1.0
    stop: StopStrings = []
    stop_token_ids: Annotated[StopTokenIds, Meta(description="Tokens that end the text, beside the model's own.")] = []
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's own end tokens.")] = False
    min_tokens: Annotated[
        NumTokens,
        Meta(
            description="Until this many tokens are generated, no end token is sampled and no stop string is matched."
        ),
    ] = 0
    include_stop_str_in_output: Annotated[bool, Meta(description="Include the stop string or token in text.")] = False
    skip_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Handling of generated special tokens. true: the text leaves them out. false: they "
            "appear, and in a chat they belong to the channel they stand in. null: they appear, and in a chat they "
            "belong to no channel."
        ),
    ] = None
    n: Annotated[NumChoices, Meta(description="Number of completions to sample from the prompt.")] = 1
    json_schema: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Generate only JSON that follows this schema, after any reasoning. Raw logprobs are those of "
            "the unconstrained distribution."
        ),
    ] = None
    regex: Regex | None = None
    choice: Choice | None = None
    grammar: Grammar | None = None
    truncate: TruncatePrompt = None
    truncate_to: TruncateTo = None
    add_bos: Annotated[bool, Meta(description="Begin a text prompt with BOS if the model uses it.")] = True
    prompt_logprobs: Annotated[
        bool,
        Meta(
            description="Report the prompt's tokens before the generated ones. The first has no logprob: null. If "
            "`logprobs` is false, the tokens are reported without logprobs."
        ),
    ] = False
    logprobs: bool = True
    logprobs_mode: Annotated[
        LogprobsMode | None,
        Meta(
            description="raw_logprobs: of the model's own distribution. processed_logprobs: `temperature` divides the "
            "logits of the prompt, and generated tokens have the logprobs of the distribution that they are sampled "
            "from. null: the server's default, SCOREPOOL_LOGPROBS_MODE."
        ),
    ] = None
    top_logprobs: TopLogprobs = 0
    targets: Annotated[TargetIds, Meta(description="Token ids whose logprobs are reported at every token.")] | None = (
        None
    )
    target_bytes: Annotated[bool, Meta(description="Report the bytes of `targets` too, once for each completion.")] = (
        False
    )
    rank: Annotated[bool, Meta(description="Report each token's rank. 1 is the most likely token.")] = False
    speculation: Annotated[
        Speculation | None,
        Meta(
            description="The source of tokens that the model then verifies; it changes no token and no logprob. ngram: "
            "the row's own text. draft: the worker's draft model. mtp: the model's head for multi-token prediction. "
            "null: what the worker does usually. Refused by a worker that does not have it."
        ),
    ] = None
    speculation_tokens: Annotated[
        SpeculationTokens | None,
        Meta(
            description="Proposed tokens in one step, at most; the worker's SCOREPOOL_SPECULATION_TOKENS may allow "
            "fewer, see `usage.speculation_tokens`. null: as many as that allows."
        ),
    ] = None
    include_draft_logprobs: Annotated[
        bool,
        Meta(
            description="Report each token that speculation proposed, with its logprob under what proposed it and "
            "under the model. Refused by a worker without speculation."
        ),
    ] = False
    specprefill: Annotated[
        bool,
        Meta(
            description="Sparse prefill, an approximation: of a prompt of 256 tokens or more, only the tokens that the "
            "worker's draft model attends to go through the model, at their own positions. The result's stamp says "
            "`approximate`. Refused by a worker without a draft model, in exact mode, and for models whose layers keep "
            "a state or slide."
        ),
    ] = False
    specprefill_keep_pct: (
        Annotated[
            KeepPct,
            Meta(description="Percent of the prompt's tokens that are kept, about. null: 20. Needs `specprefill`."),
        ]
        | None
    ) = None
    recompute: Annotated[
        bool,
        Meta(description="Score the generated tokens again, as a score job would, and report these logprobs as well."),
    ] = False
    stream: Annotated[bool, Meta(description="Stream tokens: see `GET /v1/jobs/{id}/events`.")] = False
    packed: Packed = False
    cache: UseCache = True
    cache_salt: CacheSalt = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        check_num_calls(len(message.tool_calls) for message in self.messages or ())
        shown = [image for message in self.messages or () for image in message.images]
        check_images(self.images, self.prompt, shown)
        if self.images or shown:
            self._check_beside_images()
        if self.tools and self.messages is None:
            raise ValueError("`tools` needs `messages`")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("`tool_choice` required needs `tools`")
        if unknown := set(self.allowed_tools) - {tool.name for tool in self.tools}:
            raise ValueError(f"`allowed_tools` names {quote(min(unknown))}, which is not in `tools`")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("`chat_template_kwargs` needs `messages`")
        check_json(self.json_schema, "the values of `json_schema`")
        for name in ("top_logprobs", "targets", "rank", "recompute", "include_draft_logprobs"):
            if getattr(self, name) and not self.logprobs:
                raise ValueError(f"`{name}` needs `logprobs`: true")
        for name in ("stream", "recompute", "target_bytes", "tools", "include_draft_logprobs"):
            if self.packed and getattr(self, name):
                raise ValueError(f"`packed` does not go with `{name}`")
        if self.target_bytes and self.targets is None:
            raise ValueError("`target_bytes` needs `targets`")
        check_speculation(self.speculation, self.speculation_tokens, bool(self.include_draft_logprobs))
        beside = [name for name in _NEEDS_WHOLE_PROMPT if getattr(self, name)]
        check_specprefill(
            self.specprefill, self.specprefill_keep_pct, self.speculation, self.speculation_tokens, beside
        )
        if self.stream and len(self.targets or ()) > MAX_SHOWN_TARGETS:
            raise ValueError(f"`targets` of a `stream` can be at most {MAX_SHOWN_TARGETS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("`min_tokens` must be at most `max_tokens`")
        check_truncate_to(self.truncate, self.truncate_to)
        if self.truncate == "right" and self.messages is not None:
            raise ValueError("`truncate` right would cut the place of the answer from a chat; expected left")
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise ValueError(f"`{forms[1]}` is given beside `{forms[0]}`; expected one of them")
        if forms and (self.ignore_eos or self.min_tokens):
            raise ValueError(f"`{forms[0]}` decides where the text ends: it excludes `ignore_eos` and `min_tokens`")
        if self.max_tokens == 0 and not self.prompt_logprobs:
            raise ValueError("`max_tokens` 0 generates nothing: set `prompt_logprobs` to true, or ask for more tokens")

    def _check_beside_images(self) -> None:
        """Refuse what was not tested with images, or has no meaning: an image's tokens have no logprobs."""
        for name in _NOT_BESIDE_IMAGES:
            if getattr(self, name):
                raise ValueError(f"`{name}` does not go with `images`")
        if self.speculation not in (None, "off"):
            raise ValueError(f"`speculation` {self.speculation} does not go with `images`; expected off or null")

    @property
    def is_filtered(self) -> bool:
        """True if tokens may be sampled from another distribution than the model's at the temperature."""
        filters = (self.top_p != 1, self.top_k, self.min_p, self.logit_bias, self.min_tokens)
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty != 1)
        forms = (getattr(self, name) is not None for name in FORMS)
        grammars = (*forms, self.tools and self.tool_choice != "none")
        exclusions = (self.allowed_token_ids is not None, self.bad_words)
        return any((*filters, *penalties, *grammars, *exclusions))


def check_speculation(
    speculation: Speculation | None, speculation_tokens: int | None, include_draft_logprobs: bool
) -> None:
    """Refuse details of a speculation that is switched off; raise ValueError."""
    if speculation != "off":
        return
    if speculation_tokens is not None:
        raise ValueError("`speculation_tokens` does not go with `speculation` off")
    if include_draft_logprobs:
        raise ValueError("`include_draft_logprobs` does not go with `speculation` off")


def check_specprefill(
    specprefill: bool,
    keep_pct: float | None,
    speculation: Speculation | None,
    speculation_tokens: int | None,
    beside: Iterable[str],
) -> None:
    """Refuse what sparse prefill does not go with, among it the fields that `beside` names; raise ValueError."""
    if not specprefill:
        if keep_pct is not None:
            raise ValueError("`specprefill_keep_pct` needs `specprefill`: true")
        return
    for name in beside:
        raise ValueError(f"`specprefill` does not go with `{name}`, which needs every token of the prompt")
    if speculation not in (None, "off"):
        raise ValueError(f"`specprefill` does not go with `speculation` {speculation}; expected off or null")
    if speculation_tokens is not None:
        raise ValueError("`specprefill` does not go with `speculation_tokens`: such a row proposes no tokens")


def mode_conflict(request: Generate) -> tuple[str, str] | None:
    """Return the field and the sentence that refuse a generation for its `logprobs_mode`; None if it fits."""
    if request.logprobs_mode != "processed_logprobs" or not request.logprobs:
        return None
    if request.temperature < MIN_DIVIDING_TEMPERATURE:
        return "temperature", (
            f"expected at least {MIN_DIVIDING_TEMPERATURE:g} with `logprobs_mode` processed_logprobs, which divides by "
            f"it, found {request.temperature:g}; raw_logprobs goes with 0"
        )
    if request.recompute and request.is_filtered:
        return "recompute", (
            "with `logprobs_mode` processed_logprobs it scores at the temperature alone: it goes with none of "
            "`top_p` and other filters, penalties, `min_tokens`, `allowed_token_ids`, `bad_words`, `json_schema` and "
            "other forms, and `tools`"
        )
    return None


class SamplingOptions(TypedDict, total=False):
    """Type the fields of Generate that decide how tokens are sampled and where the text ends, as keyword arguments."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    bad_words: list[str]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    min_tokens: int
    include_stop_str_in_output: bool
