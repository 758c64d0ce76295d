"""Define requests: what a client submits as a job.

A request is written without the fields that have their default, so that a release which does not know a new field still
reads every request that does not use it. Decoding is strict: an unknown field is refused.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from msgspec import Meta, Struct, msgpack
from msgspec.structs import fields, force_setattr, replace

from scorepool.wire.columns import LogprobsMode
from scorepool.wire.quote import quote

Priority = Literal["high", "normal", "low"]
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$(?!\n)",  # Python's `$` alone accepts a trailing newline
        description="A name that `GET /v1/models` lists.",
        examples=["demo"],
    ),
]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MAX_TOOL_CALLS = 1024  # of a chat, as many as messages: some templates look at all calls for each message
MAX_DEPTH = 64  # of values that may be any JSON
MAX_LIST_LENGTH = 1_000_000  # of lists without another limit
# Of the result of one job. A worker holds some 100 bytes for a token and 12 for a top logprob until the job ends, and
# an API process takes about 140 for a top logprob while it sends the result.
MAX_REPORTED_TOKENS = 2**23
MAX_TOP_LOGPROBS = 2**22
MAX_TARGET_LOGPROBS = 2**25  # of 4 bytes each, packed
MAX_TARGETS = 2**18  # at one position: as many as large vocabularies have
MAX_SHOWN_TARGETS = 1024  # in streams, and in replies that show their text
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LIST_LENGTH)]
AnyTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LIST_LENGTH)]  # possibly none
Text = Annotated[str, Meta(max_length=8_000_000)]
TargetIds = Annotated[list[TokenId], Meta(max_length=MAX_TARGETS)]
WHOLE_VOCABULARY = -1  # as a number of top logprobs
MAX_TOP_K = 1024
TopLogprobs = Annotated[
    int, Meta(ge=WHOLE_VOCABULARY, le=MAX_TOP_K, description="Most likely tokens to report at each position. -1: all.")
]
TopK = Annotated[int, Meta(ge=0, le=MAX_TOP_K, description="Most likely tokens to report at each position.")]
# Parameters of sampling, also of the requests of other servers' APIs (api/dialects).
MAX_SEED = 2**63 - 1
MAX_NUM_TOKENS = 131_072  # to generate
NumTokens = Annotated[int, Meta(ge=0, le=MAX_NUM_TOKENS)]
NumChoices = Annotated[int, Meta(ge=1, le=128)]
MIN_DIVIDING_TEMPERATURE = 1e-9  # a smaller divisor overflows float32 logits
Speculation = Literal["off", "ngram", "draft"]
SpeculationTokens = Annotated[int, Meta(ge=1, le=16)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
ScoreTemperature = Annotated[
    float, Meta(ge=MIN_DIVIDING_TEMPERATURE, le=100, description="Divides the logits before the softmax.")
]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=64)]
BadWords = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=1024)]],
    Meta(
        max_length=1024,
        description="The last token of a word is not sampled where the generated tokens before it are the word's "
        "others. Each word is taken as it is encoded without and with a space before it.",
    ),
]
AllowedTokenIds = Annotated[
    list[TokenId], Meta(min_length=1, max_length=MAX_TARGETS, description="Only these tokens are sampled.")
]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
Packed = Annotated[
    bool,
    Meta(
        description="Report the columns of all sequences together, as `packed` of the result: arrays, without the "
        "texts and bytes of tokens."
    ),
]
UseCache = Annotated[
    bool,
    Meta(
        description="false: every number is computed for this job. true: scores and greedy generations that the same "
        "weights have computed before, for the same key, may be returned again, see `cached` of the result's `stamp`."
    ),
]
IfWeights = (
    Annotated[
        int,
        Meta(
            ge=0,
            le=2**53 - 1,
            description="The version of the weights that must compute it. It waits for a later one than serves, "
            "and fails with `weights_gone` for an earlier one.",
        ),
    ]
    | None
)
CacheSalt = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256)] | None,
    Meta(description="Only jobs with the same salt, of one key, get each other's cached results and prefixes."),
]
# What the whole content of an answer must be. Of `json_schema` and these a generation has one at most.
Regex = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=16_384,
        description="Generate only content that this regular expression matches as a whole, after any reasoning.",
    ),
]
Choice = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=16_384)]],
    Meta(min_length=1, max_length=1024, description="Generate one of these texts only, after any reasoning."),
]
Grammar = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=262_144,
        description="Generate only content that this grammar derives, after any reasoning. In GBNF, with a rule "
        "`root`, or in llguidance's dialect of Lark, with a rule `start`.",
    ),
]
FORMS = ("json_schema", "regex", "choice", "grammar")
TemplateKwargs = Annotated[
    dict[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$(?!\n)")],
        bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | Annotated[str, Meta(max_length=1024)] | None,
    ],
    Meta(max_length=16, description="Variables for the model's chat template. The template must use them."),
]


class Submission(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Hold the fields that every kind of job has: its model and how it is queued."""

    model: ModelName
    priority: Priority = "normal"
    timeout_s: Annotated[int, Meta(ge=1, le=86_400, description="Seconds after its start at which it fails.")] = 600
    expires_at: (
        Annotated[float, Meta(ge=0, le=1e11, description="Unix time, in seconds, after which it is not run.")] | None
    ) = None
    webhook: (
        Annotated[str, Meta(min_length=1, max_length=2048, description="URL that receives an event when it ends.")]
        | None
    ) = None
    adapter: Annotated[
        ModelName | None,
        Meta(description="LoRA adapter of the model that computes it. Or name it as `model`. null: the model alone."),
    ] = None
    if_weights: IfWeights = None
    wait_for_model: Annotated[bool, Meta(description="Accept the job even if no live worker serves the model.")] = False

    def __post_init__(self) -> None:
        """Replace each value that equals its default by the default itself: msgspec omits a default by identity."""
        for name, default in _defaults(type(self)):
            value = getattr(self, name)
            if value is not default and value == default:
                force_setattr(self, name, default)


@cache
def _defaults(kind: type[Submission]) -> tuple[tuple[str, object], ...]:
    """Return the name and the default of every field whose default is a number, a boolean or a string."""
    return tuple((each.name, each.default) for each in fields(kind) if isinstance(each.default, int | float | str))


OnItemError = Annotated[
    Literal["fail", "report"],
    Meta(
        description="`fail`: if an item cannot be answered, the job fails, or is refused, and names it. `report`: the "
        "item has a `failure` in the result, and the others are answered."
    ),
]
Truncate = Annotated[
    Literal["left", "right"] | None,
    Meta(
        description="Cut items that are longer than the model's context. `left`: the first tokens of the prompt. "
        "`right`: the last tokens of the item. null: such an item is an error."
    ),
]


TruncatePrompt = Annotated[
    Literal["left", "right"] | None,
    Meta(
        description="Cut a prompt that is longer than `truncate_to`. `left`: its first tokens. `right`: its last ones. "
        "What the tokenizer puts around a text stays. null: a prompt that is too long is an error."
    ),
]
TruncateTo = Annotated[
    Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
    Meta(description="Tokens that `truncate` leaves at most. null: what the context holds, beside `max_tokens`."),
]


def check_truncate_to(truncate: str | None, truncate_to: int | None) -> None:
    """Check that a length to cut to comes with a side; raise ValueError."""
    if truncate_to is not None and truncate is None:
        raise ValueError("`truncate_to` needs `truncate`: left or right")


class ScoreItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give a completion to score after a prompt, its own or the job's. Both are text, or both are token ids.

    Text is encoded jointly, and spaces at the end of the prompt move into the completion, as in lm-evaluation-harness.
    Token ids are used unchanged.
    """

    prompt: Text | TokenIds | None = None
    completion: Annotated[str, Meta(min_length=1, max_length=8_000_000)] | TokenIds
    targets: (
        Annotated[
            list[TokenId | TargetIds],
            Meta(
                max_length=MAX_LIST_LENGTH,
                description="Token ids whose logprobs are reported at each position: the same at all, or a list for "
                "each reported token, if `completion` is token ids.",
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.prompt is not None and isinstance(self.prompt, str) != isinstance(self.completion, str):
            raise ValueError("`prompt` and `completion` must both be text or both be token ids")
        num_lists = sum(isinstance(each, list) for each in self.targets or ())
        if num_lists and num_lists != len(self.targets or ()):
            raise ValueError("`targets` must be token ids, or a list of token ids for each token; found both")
        if num_lists and isinstance(self.completion, str):
            raise ValueError("`targets` with a list for each token needs a `completion` of token ids")

    @property
    def target_lists(self) -> list[list[int]] | None:
        """The target ids of each reported token; None if `targets` are the same at all, or none."""
        lists = [each for each in self.targets or () if isinstance(each, list)]
        return lists or None


class Score(Submission, tag="score", frozen=True, kw_only=True):
    """Report how likely the model finds the given completions."""

    prompt: Annotated[
        Text | TokenIds | None, Meta(description="The prompt of every item. Then items give a `completion` only.")
    ] = None
    items: Annotated[list[ScoreItem], Meta(min_length=1, max_length=1024)]
    score: Annotated[
        Literal["completion", "all"],
        Meta(description="`all` also reports the prompt's tokens. The first token of a sequence has no logprob: null."),
    ] = "completion"
    top_logprobs: TopLogprobs = 0
    targets: (
        Annotated[
            TargetIds,
            Meta(description="Token ids whose logprobs are reported at every position. Items can have others."),
        ]
        | None
    ) = None
    temperature: ScoreTemperature = 1.0
    rank: Annotated[bool, Meta(description="Report each token's rank. 1 is the most likely token.")] = False
    entropy: Annotated[bool, Meta(description="Report the entropy, in nats, of each token's distribution.")] = False
    packed: Packed = False
    on_item_error: OnItemError = "fail"
    truncate: Truncate = None
    cache: UseCache = True
    cache_salt: CacheSalt = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, item in enumerate(self.items):
            if (item.prompt is None) == (self.prompt is None):
                raise ValueError(f"`items[{index}].prompt` must be given, or `prompt` for all items, and not both")
            if self.prompt is not None and isinstance(self.prompt, str) != isinstance(item.completion, str):
                raise ValueError(f"`items[{index}].completion` must be text if `prompt` is, and token ids otherwise")
            if self.targets is not None and item.targets is not None:
                raise ValueError(f"`items[{index}].targets` must not be given beside `targets` for all items")
            self._check_num_targets(index, item)

    def _check_num_targets(self, index: int, item: ScoreItem) -> None:
        lists = item.target_lists
        if lists is None:
            return
        if self.truncate is not None:
            raise ValueError(f"`items[{index}].targets` with a list for each token does not go with `truncate`")
        prompt = (self.prompt or item.prompt or ()) if self.score == "all" else ()
        num_tokens = len(prompt) + len(item.completion)
        if len(lists) != num_tokens and self.on_item_error == "fail":  # else the worker reports the item
            raise ValueError(
                f"`items[{index}].targets` has {len(lists)} lists; expected {num_tokens}, one for each reported token"
            )

    def pairs(self) -> Iterator[tuple[str | list[int], str | list[int]]]:
        """Yield the prompt and the completion of each item."""
        for item in self.items:
            prompt = self.prompt if item.prompt is None else item.prompt
            assert prompt is not None
            yield prompt, item.completion


DEFAULT_COMPARED = 128  # most likely tokens of the base
NOT_COMPARED = ("score", "targets", "entropy", "packed", "on_item_error", "truncate")


class Compare(Score, tag="compare", frozen=True, kw_only=True):
    """Score the same tokens under two models, and report how far their distributions are apart.

    A score job of `base` runs first, with the id that `base_job_id` of the result names; `model` scores its tokens
    then. Text is encoded by the base, and both models must have one vocabulary.
    """

    base: Annotated[ModelName, Meta(description="The model that `model` is compared with, such as the unquantised.")]
    top_logprobs: Annotated[
        TopLogprobs,
        Meta(
            description="The base's most likely tokens at each position, from which the divergence is computed with "
            "bounds for the rest. -1: all tokens, and the divergence is exact."
        ),
    ] = DEFAULT_COMPARED

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in _defaults(Score):
            if name in NOT_COMPARED and getattr(self, name) != default:
                raise ValueError(f"`{name}` does not go with a compare job; leave it out")
        if self.targets is not None or self.truncate is not None:
            raise ValueError(f"`{'truncate' if self.truncate else 'targets'}` does not go with a compare job")
        for index, item in enumerate(self.items):
            if item.targets is not None:
                raise ValueError(f"`items[{index}].targets` does not go with a compare job")
        if self.top_logprobs == 0:
            raise ValueError("`top_logprobs` must be at least 1, or -1 for the whole vocabulary")

    def base_request(self) -> Score:
        """Return the job of the base. `adapter`, `if_weights` and `webhook` are the model's."""
        own = ("model", "adapter", "if_weights", "webhook", "packed")
        names = [each.name for each in fields(Score) if each.name not in own]
        return Score(model=self.base, packed=True, **{name: getattr(self, name) for name in names})


def base_job_id(job_id: str) -> str:
    """Return the id of the base's job of a compare job."""
    return hashlib.blake2b(f"{job_id} base".encode(), digest_size=16).hexdigest()


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Repeat a tool call that the assistant made earlier in the chat."""

    id: str
    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        check_json(self.arguments, f"the arguments of the call of {quote(self.name)}")


STRICT = (
    "The arguments of calls follow `parameters`. If any tool is strict, the arguments of every call are constrained."
)


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Define a function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Meta(description="JSON Schema of an object.")] | None = None
    strict: Annotated[bool, Meta(description=STRICT)] = False

    def __post_init__(self) -> None:
        check_json(self.parameters, f"the parameters of {quote(self.name)}")


def check_json(value: object, name: str) -> None:
    """Check a value of any shape: JSON that is not nested deeply, with integers that msgpack can hold.

    Templates, grammars and encoders follow it by recursion. Raises ValueError.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for one in level for inner in _inner(one, name)]
        if not level:
            break
    else:
        raise ValueError(f"{name} are nested more than {MAX_DEPTH} deep")
    try:
        msgpack.encode(value)
    except OverflowError:
        raise ValueError(f"{name} hold an integer of more than 64 bits") from None


def _inner(value: object, name: str) -> Collection[object]:
    """Return the values in a list or an object. Raises ValueError for what JSON does not have."""
    match value:
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise ValueError(f"{name} hold an object whose keys are not all strings")
            return value.values()
        case list():
            return value
        case None | str() | int():
            return ()
        case float() if isfinite(value):
            return ()
        case _:
            raise ValueError(f"{name} hold a {type(value).__name__} that JSON cannot hold")


AnyRequest = TypeVar("AnyRequest", bound=Submission)


def with_top_k(request: AnyRequest, vocab_size: int) -> AnyRequest:
    """Replace -1 `top_logprobs`, the whole vocabulary, by its size."""
    if isinstance(request, Score | Generate) and request.top_logprobs == WHOLE_VOCABULARY:
        return replace(request, top_logprobs=vocab_size)
    return request


def exceeds_top_cap(k: int, cap: int) -> bool:
    """True if k most likely tokens are more than the cap. -1 is the whole vocabulary, and as a cap none."""
    return cap != WHOLE_VOCABULARY and (k == WHOLE_VOCABULARY or k > cap)


def report_excess(request: "Request", num_tokens: int, num_targets: int) -> tuple[str, str] | None:
    """Return the field and the sentence that refuse a job whose result may report so much; None if it fits.

    `top_logprobs` of the request are a number, see `with_top_k`.
    `num_targets` counts the logprobs of targets at all tokens.
    """
    if num_tokens > MAX_REPORTED_TOKENS:
        field = "items" if isinstance(request, Score) else "n" if isinstance(request, Generate) else "prompt"
        most = f"at most {MAX_REPORTED_TOKENS} in one job, send several"
        return field, f"the result may report {num_tokens} tokens; expected {most}"
    top_logprobs = request.top_logprobs if isinstance(request, Score | Generate) else 0
    if num_tokens * top_logprobs > MAX_TOP_LOGPROBS:
        most = f"at most {MAX_TOP_LOGPROBS} top logprobs in the result of one job, send several"
        return "top_logprobs", f"{num_tokens} tokens with {top_logprobs} each; expected {most}"
    max_targets = MAX_TARGET_LOGPROBS
    if isinstance(request, Generate) and request.target_bytes:
        max_targets = MAX_TOP_LOGPROBS  # replies that show their text are as large as those of top logprobs
    if num_targets > max_targets:
        most = f"at most {max_targets} logprobs of targets in the result of one job, send several"
        return "targets", f"the result may have {num_targets}; expected {most}"
    return None


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give one message of a chat, as the chat template sees it. A template may ignore all fields after `content`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    reasoning_content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] = []


def check_num_calls(numbers: Iterable[int], field: str = "messages") -> None:
    """Check how many tool calls a chat has, given those of each message; raise ValueError if they are too many."""
    num_calls = sum(numbers)
    if num_calls > MAX_TOOL_CALLS:
        raise ValueError(f"`{field}` has {num_calls} tool calls in all; expected at most {MAX_TOOL_CALLS}")


class Generate(Submission, tag="generate", frozen=True, kw_only=True):
    """Continue a prompt, or answer a chat, and report the logprob of every token that was sampled."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
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
    top_k: Annotated[int, Meta(ge=0, le=1_000_000, description="0 keeps every token.")] = 0
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
            "the row's own text. draft: the worker's draft model. null: what the worker does usually. Refused by a "
            "worker that does not have it."
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
            description="Report each token that speculation proposed, with its logprob under the draft model and under "
            "the model. Refused by a worker without speculation."
        ),
    ] = False
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


class Tokenize(Submission, tag="tokenize", frozen=True, kw_only=True):
    """Report the tokens of a text or a chat, or the text of tokens. The model does not run.

    It is a kind of job because the worker holds the tokenizer. The result holds one sequence, without logprobs.
    """

    prompt: Text | AnyTokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128, description="Functions that the chat shows to the model.")] = []
    chat_template_kwargs: TemplateKwargs = {}
    add_bos: Annotated[bool, Meta(description="Begin a text with BOS if the model uses it.")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise ValueError(f"`{name}` needs `messages`")
        check_num_calls(len(message.tool_calls) for message in self.messages or ())


class ClassifyItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give what to classify: a text, token ids, or a chat up to its last message."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        check_num_calls(len(message.tool_calls) for message in self.messages or ())


class Classify(Submission, tag="classify", frozen=True, kw_only=True):
    """Report what a classifier, such as a reward model, says about texts. Such a model takes no other job but tokenize.

    The last token that is not padding is classified, as transformers does. If one item fails, the job fails and names
    it, unless `on_item_error` is `report`.
    """

    items: Annotated[list[ClassifyItem], Meta(min_length=1, max_length=1024)]
    add_special_tokens: Annotated[
        bool,
        Meta(description="Begin and end a text as the model's tokenizer does. A chat has what its template writes."),
    ] = True
    on_item_error: OnItemError = "fail"
    truncate: TruncatePrompt = None
    truncate_to: TruncateTo = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncate_to(self.truncate, self.truncate_to)


class EmbedItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give what to embed: a text or token ids."""

    prompt: Text | TokenIds


Pooling = Literal["last", "mean"]


class Embed(Submission, tag="embed", frozen=True, kw_only=True):
    """Report the embeddings of texts: the pooled final hidden states of the model. If one item fails, the job fails."""

    items: Annotated[list[EmbedItem], Meta(min_length=1, max_length=1024)]
    pooling: Annotated[
        Pooling | None,
        Meta(
            description="`last`: the last token. `mean`: the mean of all. null: the model's own, see `GET /v1/models`."
        ),
    ] = None
    normalize: Annotated[bool, Meta(description="Divide each embedding by its length.")] = True
    dimensions: (
        Annotated[int, Meta(ge=1, le=65_536, description="Keep the first numbers, before they are normalised.")] | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="Begin and end a text as the model's tokenizer does.")] = True
    truncate: TruncatePrompt = None
    truncate_to: TruncateTo = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncate_to(self.truncate, self.truncate_to)


Request = Score | Compare | Generate | Tokenize | Classify | Embed
Kind = Literal["score", "compare", "generate", "tokenize", "classify", "embed"]


def with_bases(requests: Sequence[Request], job_ids: Sequence[str]) -> tuple[list[Request], list[str]]:
    """Return the jobs of a submission and their ids, with the base's job of each compare job before it."""
    pairs: list[tuple[Request, str]] = []
    for request, job_id in zip(requests, job_ids, strict=True):
        if isinstance(request, Compare):
            pairs.append((request.base_request(), base_job_id(job_id)))
        pairs.append((request, job_id))
    return [request for request, _ in pairs], [job_id for _, job_id in pairs]


def kind_of(request: Request) -> Kind:
    """Return the `type` that the request has in JSON."""
    return request.__struct_config__.tag  # type: ignore[return-value]
