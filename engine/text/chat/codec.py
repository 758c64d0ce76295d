"""Encode chats with the model's template, and decode its answers: channels, tool calls, constraints. No MLX.

messages ──template──► ids + generation prompt ──► model ──► token ids ──output parser──► channels, spans
                                   │                 ▲                                          │
                                   └─grammar compiler┘ token bitmasks               tool parser └──► calls
"""

from collections.abc import Sequence

from scorepool.engine.images import ImageCodec
from scorepool.engine.text.chat.chat_format import ChatTags, detect_chat_format
from scorepool.engine.text.chat.grammar_compiler import GrammarCompiler
from scorepool.engine.text.chat.output_parser import OutputParser, Span
from scorepool.engine.text.chat.template import NO_VARIABLES, ChatTemplate, Message, Variables
from scorepool.engine.text.chat.tool_parser import ParsedCall, Tool, parse_text, parse_tool_calls
from scorepool.engine.text.tokenizer import Tokenizer


class ChatCodec:
    """The encoder and decoder of a model's chats. Built once, when the model is loaded."""

    def __init__(self, tokenizer: Tokenizer, tags: ChatTags | None = None, repairs_calls: bool = False) -> None:
        self.tokenizer = tokenizer
        self.images: ImageCodec | None = None  # None: the model takes no images
        self.images_unsupported: str | None = None  # why, if it could take some
        self.repairs_calls = repairs_calls  # calls that are written as text are read too
        self.template = ChatTemplate(tokenizer)
        self.chat_format = detect_chat_format(tags or ChatTags(), tokenizer)
        self.grammar_compiler = GrammarCompiler(tokenizer, self.chat_format)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), variables: Variables = NO_VARIABLES
    ) -> tuple[list[int], list[int]]:
        """Return the ids of the rendered chat, and the ids at its end that are the generation prompt.

        The only BOS is the template's own. Raises InvalidRequest.
        """
        return self.encode_rendered(*self.template.render(messages, tools, variables))

    def encode_rendered(self, text: str, generation_prompt: str) -> tuple[list[int], list[int]]:
        """Return the ids of a rendered chat, and those at its end that are the generation prompt."""
        ids, _ = self.tokenizer.encode(text, add_bos=False)
        start, num_bytes = len(ids), len(generation_prompt.encode())
        while start and num_bytes > 0:
            start -= 1
            num_bytes -= len(self.tokenizer.token_bytes(ids[start]))
        return ids, ids[start:]

    def output_parser(
        self, generation_prompt: Sequence[int], keep_special_tokens: bool = False, may_call: bool = True
    ) -> OutputParser:
        """Return a parser of one answer to a chat that ends with this generation prompt."""
        return OutputParser(
            self.chat_format,
            self.tokenizer.token_bytes,
            generation_prompt,
            keep_special_tokens,
            may_call,
            self.repairs_calls,
        )

    def parse_tool_calls(self, span: Span, token_ids: Sequence[int], tools: Sequence[Tool]) -> list[ParsedCall]:
        """Return the calls in a span of an answer, or none if it cannot be parsed or calls an unknown function."""
        text = b"".join(map(self.tokenizer.token_bytes, token_ids[span.start : span.end]))
        if span.is_text:
            return parse_text(text, tools)
        return parse_tool_calls(self.chat_format, span.header, text, tools)

    def tools_unsupported_reason(self, may_call: bool = True) -> str | None:
        """Return why the model cannot be shown tools, or cannot call them. None if it can. Raises InvalidRequest."""
        if not self.template.renders_tools:
            return "the model's chat template does not render tools"
        if may_call and self.chat_format.tool_parser is None and not self.repairs_calls:
            return "the format in which this model calls functions is not known"
        return None
