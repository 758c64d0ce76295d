"""Define the request to classify texts."""

from typing import Annotated

from msgspec import Meta, Struct

from scorepool.wire.chat import Message, check_num_calls
from scorepool.wire.request_fields import (
    CacheSalt,
    OnItemError,
    Text,
    TokenIds,
    TruncatePrompt,
    TruncateTo,
    check_truncate_to,
)
from scorepool.wire.submission import Submission


class ClassifyItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give what to classify: a text, token ids, or a chat up to its last message."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        check_num_calls(len(message.tool_calls) for message in self.messages or ())
        if any(message.images for message in self.messages or ()):
            raise ValueError("`messages` of a classify job have no images")


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
    cache_salt: CacheSalt = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncate_to(self.truncate, self.truncate_to)
