"""Define the types of the fields of requests, with their limits."""

from typing import Annotated, Literal

from msgspec import Meta

Priority = Literal["high", "normal", "low"]
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$(?!\n)",  # Python's `$` alone accepts a trailing newline
        description="A name that `GET /v1/models` lists.",
        examples=["demo"],
    ),
]
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
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
MAX_SAMPLED_TOP_K = 1_000_000  # no vocabulary is larger
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
Speculation = Literal["off", "ngram", "draft", "mtp"]
ChosenSpeculation = Annotated[  # of dialects
    Speculation,
    Meta(
        description="An addition. The source of tokens that the model then verifies, if the worker has it. It changes "
        "no token and no logprob."
    ),
]
SpeculationTokens = Annotated[int, Meta(ge=1, le=16)]
MostProposedTokens = Annotated[
    SpeculationTokens,
    Meta(description="An addition. Proposed tokens in one step, at most; the worker may allow fewer."),
]
KeepPct = Annotated[float, Meta(ge=1, le=100)]
DEFAULT_KEEP_PCT = 20.0
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
