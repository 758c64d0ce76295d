"""What a client may ask for."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, msgpack

Priority = Literal["high", "normal", "low"]
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$(?!\n)",  # Python's `$` alone lets a last newline pass
        description="A name that `GET /v1/models` lists.",
        examples=["demo"],
    ),
]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)]
Text = Annotated[str, Meta(max_length=8_000_000)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
TopLogprobs = Annotated[int, Meta(ge=0, le=128, description="Likeliest tokens to report beside each token.")]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TemplateKwargs = Annotated[
    dict[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$(?!\n)")],
        bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | Annotated[str, Meta(max_length=1024)] | None,
    ],
    Meta(max_length=16, description="Variables of the model's chat template, which must know them."),
]


class Submission(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every job says about its own way through the queue."""

    model: ModelName
    priority: Priority = "normal"
    timeout_s: Annotated[int, Meta(ge=1, le=86_400, description="Seconds from its start after which it fails.")] = 600
    expires_at: (
        Annotated[float, Meta(ge=0, le=1e11, description="Unix time, in seconds, after which it is not run.")] | None
    ) = None
    webhook: (
        Annotated[str, Meta(min_length=1, max_length=2048, description="URL that is told when the job ends.")] | None
    ) = None
    wait_for_model: Annotated[bool, Meta(description="Accept the job though no live worker serves the model.")] = False


class ScoreItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One completion to score after one prompt, each as text or as token ids.

    Text is encoded jointly, and spaces that end the prompt move into the completion, as lm-evaluation-harness does;
    token ids pass untouched. Both fields must be of the same kind.
    """

    prompt: Text | TokenIds
    completion: Annotated[str, Meta(min_length=1, max_length=8_000_000)] | TokenIds

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str) != isinstance(self.completion, str):
            raise ValueError("`prompt` and `completion` must both be text or both be token ids")


class Score(Submission, tag="score", frozen=True, kw_only=True):
    """Report how likely the model finds completions that the caller wrote."""

    items: Annotated[list[ScoreItem], Meta(min_length=1, max_length=1024)]
    score: Annotated[
        Literal["completion", "all"],
        Meta(description="`all` reports the prompt's tokens too; the first token of a sequence has no logprob: null."),
    ] = "completion"
    top_logprobs: TopLogprobs = 0
    temperature: Annotated[float, Meta(ge=1e-9, le=100, description="Divides the logits before the softmax.")] = 1.0
    rank: Annotated[bool, Meta(description="Report each token's rank: 1 is the likeliest.")] = False
    entropy: Annotated[bool, Meta(description="Report the entropy, in nats, of each token's distribution.")] = False


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One that the assistant made earlier in the chat."""

    id: str
    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        check_integers(self.arguments, f"the arguments of the call of {self.name[:80]!r}")


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Meta(description="JSON Schema of an object.")] | None = None
    strict: Annotated[
        bool, Meta(description="Calls follow `parameters`. Of one tool it constrains the calls of all.")
    ] = False

    def __post_init__(self) -> None:
        check_integers(self.parameters, f"the parameters of {self.name[:80]!r}")


def check_integers(value: object, name: str) -> None:
    """Raises ValueError where msgpack cannot hold one."""
    try:
        msgpack.encode(value)
    except OverflowError:
        raise ValueError(f"{name} hold an integer beyond 64 bits") from None


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a chat template sees. What follows `content` is for templates that know it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    reasoning_content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = []


class Generate(Submission, tag="generate", frozen=True, kw_only=True):
    """Continue a prompt, or answer a chat, and report the logprob of every token that was sampled."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128, description="What a chat's answer may call.")] = []
    tool_choice: Annotated[
        Literal["auto", "none", "required"],
        Meta(
            description="`none`: the model is shown the tools, and what it calls is content. `required`: after what "
            "reasoning there is it calls, in its own format and with arguments of the tool's schema."
        ),
    ] = "auto"
    allowed_tools: Annotated[
        list[str], Meta(max_length=128, description="Names of those of the tools that may be called; empty: all.")
    ] = []
    parallel_tool_calls: Annotated[bool, Meta(description="false: an answer holds at most one call.")] = True
    chat_template_kwargs: TemplateKwargs = {}
    max_tokens: (
        Annotated[int, Meta(ge=0, le=131_072, description="0 only reports the prompt; null: what fits, up to 4096.")]
        | None
    ) = 128
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000, description="0 keeps every token.")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
        Meta(max_length=1024, description="Added to a token's logit before it is sampled, by token id."),
    ] = {}
    presence_penalty: Annotated[Penalty, Meta(description="Off the logit of every token generated before.")] = 0.0
    frequency_penalty: Annotated[Penalty, Meta(description="The same, once for each time it was generated.")] = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100, description="Divides (where negative: multiplies) logits of tokens seen before.")
    ] = 1.0
    stop: Annotated[list[StopString], Meta(max_length=64)] = []
    stop_token_ids: Annotated[StopTokenIds, Meta(description="End the text, as the model's own end tokens do.")] = []
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's own end tokens.")] = False
    min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=131_072,
            description="Before so many, no token that ends a text is sampled, and no stop string looked for.",
        ),
    ] = 0
    include_stop_str_in_output: Annotated[bool, Meta(description="The stop string or token is in the text.")] = False
    skip_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Special tokens that are generated: true, they are not in the text; false, they are, and of a "
            "chat in the channel where they stand; null, they are, and of a chat in no channel."
        ),
    ] = None
    n: Annotated[int, Meta(ge=1, le=128, description="Completions to sample from the one prompt.")] = 1
    json_schema: Annotated[
        dict[str, Any] | None,
        Meta(description="Generate JSON of this schema alone, after what reasoning there is. Logprobs are as without."),
    ] = None
    add_bos: Annotated[bool, Meta(description="Begin a text prompt with BOS, where the model is used to it.")] = True
    prompt_logprobs: Annotated[
        bool,
        Meta(
            description="Report the prompt's tokens before the generated ones; the first has no logprob: null. Without "
            "`logprobs` none has one, and none is computed."
        ),
    ] = False
    logprobs: bool = True
    top_logprobs: TopLogprobs = 0
    rank: Annotated[bool, Meta(description="Report each token's rank: 1 is the likeliest.")] = False
    recompute: Annotated[
        bool,
        Meta(description="Score what was generated once more, as a score job would, and report those logprobs beside."),
    ] = False
    stream: Annotated[bool, Meta(description="Tell of the tokens while they come: `GET /v1/jobs/{id}/events`.")] = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        if self.tools and self.messages is None:
            raise ValueError("`tools` are for a chat: they need `messages`")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("`tool_choice` required needs `tools`")
        if unknown := set(self.allowed_tools) - {tool.name for tool in self.tools}:
            raise ValueError(f"`allowed_tools` names {min(unknown)[:80]!r}, which is none of the `tools`")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("`chat_template_kwargs` are for a chat: they need `messages`")
        check_integers(self.json_schema, "the numbers of `json_schema`")
        for name in ("top_logprobs", "rank", "recompute"):
            if getattr(self, name) and not self.logprobs:
                raise ValueError(f"`{name}` needs `logprobs`: true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("`min_tokens` must be at most `max_tokens`")
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("`json_schema` says where the text ends: give it neither `ignore_eos` nor `min_tokens`")
        if self.max_tokens == 0 and not self.prompt_logprobs:
            raise ValueError("`max_tokens` 0 generates nothing: give `prompt_logprobs`: true, or more tokens")


class Tokenize(Submission, tag="tokenize", frozen=True, kw_only=True):
    """Report the tokens of a text or a chat, or the text of tokens. The model does not run.

    A kind of job, for the tokenizer is the worker's: the result holds one sequence, without logprobs.
    """

    prompt: Text | Annotated[list[TokenId], Meta(max_length=1_000_000)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    add_bos: Annotated[bool, Meta(description="Begin a text with BOS, where the model is used to it.")] = True

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")


Request = Score | Generate | Tokenize
Kind = Literal["score", "generate", "tokenize"]


def kind_of(request: Request) -> Kind:
    """The `type` that the request has in JSON."""
    return request.__struct_config__.tag  # type: ignore[return-value]
