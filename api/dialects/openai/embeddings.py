"""Define the body and the reply of `/v1/embeddings`, and translate them to one embed job. Pure."""

import base64
import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.openai.sampling import Label, NoEffect
from scorepool.api.dialects.priority import PriorityNumber, to_priority
from scorepool.api.dialects.truncation import (
    NAMES,
    RIGHT,
    Side,
    TruncatePromptTokens,
    check_truncation,
    truncation_fields,
)
from scorepool.wire.embed import Pooling
from scorepool.wire.request_fields import ModelName, Text, TokenId, TokenIds

MAX_INPUTS = 1024
_ITEM = re.compile(r"items\[(\d+)\]\.prompt(.*)", re.DOTALL)


class EmbeddingsRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Embed texts, each given as text or as token ids. A field that is null has its default."""

    model: ModelName
    input: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=131_072)]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: float32, little-endian.")
    ] = None
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=65_536,
                description="Keep the first numbers, and divide them by their length: for models that were trained so.",
            ),
        ]
        | None
    ) = None
    pooling: Annotated[Pooling | None, Meta(description="An addition. null: the model's own.")] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: Annotated[Side | None, Meta(description="Side on which a text is cut. null: right.")] = None
    priority: PriorityNumber = None
    user: NoEffect[Label] | None = None

    def __post_init__(self) -> None:
        check_truncation(self.truncate_prompt_tokens)
        if isinstance(self.input, str):
            return
        kinds = {type(each) for each in self.input}
        if len(kinds) > 1:
            raise ValueError("`input` must hold texts, token ids or lists of token ids, not several of them")
        if kinds != {int} and len(self.input) > MAX_INPUTS:
            raise ValueError(f"`input` must hold at most {MAX_INPUTS} texts")

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts, each as text or as token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]
        return self.input  # type: ignore[return-value]

    @property
    def is_single(self) -> bool:
        """True if `input` is one text or its token ids."""
        return isinstance(self.input, str) or isinstance(self.input[0], int)


class EmbeddingObject(Struct, frozen=True, kw_only=True):
    """Give the embedding of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[list[float] | str, Meta(description="A string with `encoding_format` base64.")]


class EmbeddingsUsage(Struct, frozen=True, kw_only=True):
    """Count the tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """Answer with the embeddings, in the order of the texts. Their length is 1."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage
    pooling: Annotated[Pooling | None, Meta(description="The pooling of the hidden states.")]


def to_request(body: EmbeddingsRequest, timeout_s: int) -> wire.Embed:
    """Build the job."""
    return wire.Embed(
        model=body.model,
        timeout_s=timeout_s,
        priority=to_priority(body.priority),
        items=[wire.EmbedItem(prompt=each) for each in body.inputs],
        pooling=body.pooling,
        dimensions=body.dimensions,
        add_special_tokens=body.add_special_tokens is not False,
        **truncation_fields(body.truncate_prompt_tokens, body.truncation_side, RIGHT),
    )


def to_embeddings(body: EmbeddingsRequest, result: wire.Result) -> EmbeddingList:
    """Build the reply."""
    num_tokens = result.usage.prompt_tokens
    return EmbeddingList(
        data=[
            EmbeddingObject(index=index, embedding=_encode(one.values, body.encoding_format == "base64"))
            for index, one in enumerate(result.embeddings)
        ],
        model=body.model,
        usage=EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        pooling=result.stamp.pooling,
    )


def field_name(body: EmbeddingsRequest, field: str) -> str:
    """Map a field of the job to one of the body."""
    match = _ITEM.fullmatch(field)
    if match is None:
        return "input" if field.startswith("items") else NAMES.get(field, field)
    return f"input{'' if body.is_single else f'[{match[1]}]'}{match[2]}"


def _encode(values: wire.Floats, as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(values.pack()).decode()
    return [value for value in values.values() if value is not None]
