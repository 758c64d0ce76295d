"""Define the request to embed texts."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool.wire.request_fields import Text, TokenIds, TruncatePrompt, TruncateTo, check_truncate_to
from scorepool.wire.submission import Submission


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
