"""What a client may ask for."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

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
TopLogprobs = Annotated[int, Meta(ge=0, le=20, description="Likeliest tokens to report beside each token.")]


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


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class Generate(Submission, tag="generate", frozen=True, kw_only=True):
    """Continue a prompt, or answer a chat, and report the logprob of every token that was sampled."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=131_072)] = 128
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000, description="0 keeps every token.")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=64)] = []
    n: Annotated[int, Meta(ge=1, le=128, description="Completions to sample from the one prompt.")] = 1
    logprobs: bool = True
    top_logprobs: TopLogprobs = 0

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")


Request = Score | Generate
