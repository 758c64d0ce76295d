"""Define the request for the tokens of a text or the text of tokens."""

from typing import Annotated

from msgspec import Meta

from scorepool.wire.chat import Message, Tool, check_num_calls
from scorepool.wire.image import check_images
from scorepool.wire.request_fields import AnyTokenIds, TemplateKwargs, Text
from scorepool.wire.submission import Submission


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
        check_images((), None, [image for message in self.messages or () for image in message.images])
