"""Read the body of ms-swift's `/infer/`: chats whose last turn is token ids, to be scored or continued. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.openai.messages import MAX_PARTS, ROLES, ChatTool, TextPart
from scorepool.api.dialects.openai.tokens import OptionalModel
from scorepool.api.dialects.top_k import SampledTopK, to_top_k
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.request_fields import (
    MinP,
    NumTokens,
    Penalty,
    RepetitionPenalty,
    Seed,
    StopStrings,
    Temperature,
    TemplateKwargs,
    Text,
    TokenId,
    TokenIds,
    TopLogprobs,
    TopP,
)

MAX_REQUESTS = 1024
NotRead = Annotated[Any, Meta(description="Has no effect here.")]

_Int = Annotated[int, Meta(le=2**31 - 1)]  # of which one value is supported


class TokensOfTurn(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give the token ids of a turn. `loss_scale` is the trainer's own."""

    token_ids: TokenIds | None = None
    input_ids: Annotated[TokenIds | None, Meta(description="Another name of `token_ids`.")] = None
    loss_scale: NotRead = None

    def __post_init__(self) -> None:
        if (self.token_ids is None) == (self.input_ids is None):
            raise ValueError("give exactly one of `token_ids` and `input_ids`")


class SwiftMessage(Struct, frozen=True, kw_only=True):
    """Give one message. Unknown fields are ignored. That of the assistant, if it comes last, is token ids."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart | TokenId], Meta(max_length=1_000_000)] | TokensOfTurn

    @property
    def token_ids(self) -> list[int] | None:
        """Return the content's token ids, None if it is text."""
        if isinstance(self.content, TokensOfTurn):
            return self.content.token_ids or self.content.input_ids
        is_ids = isinstance(self.content, list) and self.content and isinstance(self.content[0], int)
        return self.content if is_ids else None  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if isinstance(self.content, list) and len({type(each) for each in self.content}) > 1:
            raise ValueError("`content` is a string, a list of text parts, or a list of token ids")
        if isinstance(self.content, list) and self.token_ids is None and len(self.content) > MAX_PARTS:
            raise ValueError(f"`content` has more than {MAX_PARTS} parts")

    def to_wire(self) -> wire.Message:
        """Translate a message of text."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        texts = [each.text if isinstance(each, TextPart) else str(each) for each in parts]  # type: ignore[union-attr]
        return wire.Message(role=ROLES[self.role], content="".join(texts))


class InferRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give one chat."""

    messages: Annotated[list[SwiftMessage], Meta(min_length=1, max_length=1024)]
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    audios: Annotated[list[Any], Meta(max_length=0)] | None = None
    videos: Annotated[list[Any], Meta(max_length=0)] | None = None
    objects: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    data_dict: NotRead = None
    uuid: NotRead = None

    def __post_init__(self) -> None:
        for place, message in enumerate(self.messages[:-1]):
            if message.token_ids is not None:
                raise ValueError(f"`messages[{place}].content`: only the last message can be token ids")
        last = self.messages[-1]
        if (last.role == "assistant") != (last.token_ids is not None):
            raise ValueError("the last message is token ids if it is the assistant's, and text if it is not")
        if last.token_ids is not None and len(self.messages) == 1:
            raise ValueError("`messages` needs a message before the assistant's")

    @property
    def response_ids(self) -> list[int]:
        """Return the token ids of the assistant's last turn, none if it has not begun."""
        return self.messages[-1].token_ids or []

    @property
    def text_messages(self) -> list[wire.Message]:
        """Return the messages before that turn."""
        return [message.to_wire() for message in self.messages if message.token_ids is None]


class InferConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample and what to report. A field that is null has its default."""

    max_tokens: Annotated[NumTokens, Meta(description="null: what fits, at most 4096.")] | None = None
    temperature: Temperature | None = None
    top_k: SampledTopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopStrings | None = None
    seed: Seed | None = None
    prompt_logprobs: (
        Annotated[TopLogprobs, Meta(description="Most likely tokens beside each of the prompt. null: no logprobs.")]
        | None
    ) = None
    return_details: Annotated[bool | None, Meta(description="The reply has token ids.")] = None
    n: _Int | None = None
    best_of: _Int | None = None
    num_beams: _Int | None = None
    length_penalty: float | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: _Int | None = None
    structured_outputs_regex: str | None = None

    def __post_init__(self) -> None:
        check_supported(self, {"n": 1, "best_of": 1, "num_beams": 1, "length_penalty": 1.0, "stream": False})
        check_supported(self, {"logprobs": False, "top_logprobs": 0, "structured_outputs_regex": None})
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("`max_tokens` 0 generates nothing: it needs `prompt_logprobs`")


class InferBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score or continue chats."""

    infer_requests: Annotated[list[InferRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]
    request_config: InferConfig | None = None
    model: OptionalModel = None
    metrics: Annotated[list[Any], Meta(max_length=0)] | None = None
    use_tqdm: bool | None = None
    adapter_request: None = None

    @property
    def config(self) -> InferConfig:
        """Return how to sample and what to report."""
        return self.request_config or InferConfig()


def to_request(body: InferBody, prompt: list[int], model: str, timeout_s: int) -> wire.Generate:
    """Build the job of one chat, of which these are the token ids."""
    config = body.config
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    options: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    return wire.Generate(
        **options,
        model=model,
        timeout_s=timeout_s,
        prompt=prompt,
        max_tokens=config.max_tokens,
        top_k=to_top_k(config.top_k),
        stop=config.stop or [],
        seed=config.seed,
        skip_special_tokens=True,
        prompt_logprobs=config.prompt_logprobs is not None,
        logprobs=config.prompt_logprobs is not None,
        top_logprobs=config.prompt_logprobs or 0,
        rank=config.prompt_logprobs is not None,
    )
