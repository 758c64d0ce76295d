"""Define the bodies and replies of `/tokenize` and `/detokenize`, as vLLM has them. Pure."""

from typing import Annotated

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.detokenizer import token_text
from scorepool.api.dialects.openai.messages import ChatMessage, ChatTool
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.request_fields import AnyTokenIds, ModelName, TemplateKwargs, Text

OptionalModel = Annotated[ModelName | None, Meta(description="Needed if several models are served.")]


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Encode a text or a chat."""

    model: OptionalModel = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=128)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def __post_init__(self) -> None:
        check_supported(self, {"add_generation_prompt": True, "continue_final_message": False})
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise ValueError(f"`{name}` needs `messages`")


class TokenizeReply(Struct, frozen=True, kw_only=True):
    """Give the token ids of a text or a chat."""

    count: int
    max_model_len: Annotated[int, Meta(description="Tokens of the model's context.")]
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Meta(description="Set with `return_token_strs`.")] = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode token ids."""

    model: OptionalModel = None
    tokens: AnyTokenIds


class DetokenizeReply(Struct, frozen=True, kw_only=True):
    """Give the text of token ids."""

    prompt: str


def to_tokenize_reply(result: wire.Result, max_model_len: int, with_strings: bool) -> TokenizeReply:
    """Build the reply, with the text of each token if `with_strings`."""
    [sequence] = result.sequences
    strings = [token_text(*token) for token in zip(sequence.token_ids, sequence.token_bytes, strict=True)]
    return TokenizeReply(
        count=len(sequence.token_ids),
        max_model_len=max_model_len,
        tokens=sequence.token_ids,
        token_strs=strings if with_strings else None,
    )


def to_detokenize_reply(result: wire.Result) -> DetokenizeReply:
    """Build the reply."""
    [sequence] = result.sequences
    return DetokenizeReply(prompt=sequence.text)
