"""Translate vLLM's `/classify`: the labels and probabilities of texts or of a chat. Pure."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects import classify_jobs
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.messages import ChatMessage
from scorepool.api.dialects.openai.sampling import CompletionUsage, to_usage
from scorepool.api.dialects.openai.tokens import OptionalModel
from scorepool.api.dialects.priority import PriorityNumber, to_priority
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.api.dialects.truncation import (
    NAMES,
    RIGHT,
    Side,
    TruncatePromptTokens,
    check_truncation,
    truncation_fields,
)
from scorepool.api.dialects.unsupported import check_supported
from scorepool.api.dialects.vllm import foreign_fields
from scorepool.wire.chat import check_num_calls
from scorepool.wire.request_fields import MAX_LIST_LENGTH, CacheSalt, Text, TokenId, TokenIds

UseActivation = Annotated[
    bool | None, Meta(description="false: logits. null is true: what the model's head makes of them.")
]
TruncationSide = Annotated[Side | None, Meta(description="Side on which a text is cut. null: right.")]


class ClassificationRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Classify texts, token ids or one chat. A field that is null has its default."""

    model: OptionalModel = None
    input: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_LIST_LENGTH)] | None = (
        None
    )
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    use_activation: UseActivation = None
    activation: Annotated[bool | None, Meta(description="The name of `use_activation` before vLLM 0.11.2.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="null: true for texts, false for a chat.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: CacheSalt = None
    priority: PriorityNumber = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None

    def __post_init__(self) -> None:
        check_truncation(self.truncate_prompt_tokens)
        check_supported(self, {"add_generation_prompt": False, "continue_final_message": False})
        if None not in (self.use_activation, self.activation) and self.use_activation != self.activation:
            raise ValueError("`activation` is an older name of `use_activation`: give one of them")
        if (self.input is None) == (self.messages is None):
            raise ValueError("give exactly one of `input` and `messages`")
        if isinstance(self.input, list) and len({type(each) for each in self.input}) > 1:
            raise ValueError("`input` is a string, a list of strings, a list of token ids, or a list of such lists")
        if self.messages is not None:
            check_supported(self, {"add_special_tokens": False})
            check_num_calls(len(message.tool_calls or ()) for message in self.messages)

    @property
    def is_activated(self) -> bool:
        """True if the reply has what the model's head makes of the logits."""
        return self.use_activation is not False and self.activation is not False

    @property
    def has_list(self) -> bool:
        """True if `input` is a list of texts."""
        return isinstance(self.input, list) and not isinstance(self.input[0], int)

    @property
    def items(self) -> list[wire.ClassifyItem]:
        """Return what to classify."""
        if self.messages is not None:
            return [wire.ClassifyItem(messages=[message.to_wire() for message in self.messages])]
        texts: Any = self.input if self.has_list else [self.input]
        return [wire.ClassifyItem(prompt=text) for text in texts]

    @property
    def num_items(self) -> int:
        """Return how many texts are classified."""
        return len(self.input or ()) if self.has_list else 1


class ClassifiedText(Struct, frozen=True, kw_only=True):
    """Report what the model says about one text."""

    index: int
    label: str
    probs: Annotated[
        list[float], Meta(description="One per label, in the model's order. Logits with `use_activation` false.")
    ]
    num_classes: int


class ClassificationResponse(Struct, frozen=True, kw_only=True):
    """Report what the model says about each text."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifiedText]
    usage: CompletionUsage


def shown_values(one: wire.Classification, is_activated: bool) -> list[float]:
    """Return the probabilities of a text, or its logits: those of a regression are what its head makes of them."""
    return list(map(float, one.probs if is_activated and one.probs is not None else one.logits))


class ClassifyEndpoint(Endpoint[ClassificationRequest]):
    name = "classify"
    path = "/classify"
    summary = "Labels of texts"
    description = "The answers of a served classifier, such as a reward model. See also classify jobs."
    example: ClassVar = {"model": "rm", "input": ["The sky is blue.", "The sky is a fish."]}
    body_type = ClassificationRequest
    reply_type = ClassificationResponse
    foreign_fields = foreign_fields.CLASSIFY

    def job_count(self, body: ClassificationRequest) -> JobCount:
        return JobCount(
            classify_jobs.num_jobs(body.num_items), "input", f"jobs of {classify_jobs.ITEMS_PER_JOB} texts each"
        )

    def to_requests(self, body: ClassificationRequest, context: Context) -> Iterator[wire.Request]:
        assert context.served_model is not None
        return classify_jobs.to_classify_jobs(
            body.items,
            context.served_model.id,
            context.timeout_s,
            add_special_tokens=body.add_special_tokens is not False,
            priority=to_priority(body.priority),
            cache_salt=body.cache_salt,
            truncation=truncation_fields(body.truncate_prompt_tokens, body.truncation_side, RIGHT),
        )

    def to_reply(
        self, body: ClassificationRequest, results: Sequence[wire.Result], context: Context
    ) -> ClassificationResponse:
        assert context.served_model is not None
        data = [
            ClassifiedText(
                index=index,
                label=one.label,
                probs=shown_values(one, body.is_activated),
                num_classes=len(one.logits),
            )
            for index, one in enumerate(classify_jobs.classifications(results))
        ]
        return ClassificationResponse(
            id=f"classify-{context.unique_id}",
            created=context.created,
            model=body.model or context.served_model.id,
            data=data,
            usage=to_usage(sum(result.usage.prompt_tokens for result in results), 0),
        )

    def field_name(self, body: ClassificationRequest, field: str) -> str:
        found = classify_jobs.find_item(field)
        if found is None:
            return _other_field(field)
        index, rest = found
        if body.messages is not None:
            return rest.removeprefix(".") or "messages"
        return f"input[{index}]{rest}" if body.has_list else f"input{rest}"


_other_field = map_field(NAMES)
CLASSIFY = ClassifyEndpoint()
