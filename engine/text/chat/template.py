"""Render a chat to the text that prompts the model, with the model's own template."""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # in OpenAI's shape, except that a call's arguments are an object
Variables = Mapping[str, bool | int | float | str | None]
NO_VARIABLES: Variables = {}
_PROBE_TEXT = "probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_GLOBAL_NAMES = {"messages", "raise_exception", "strftime_now"}  # what transformers gives every template


class GenerationBlock(Extension):
    """Read the blocks in which templates mark what a model generated, `{% generation %}`, as transformers does."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes in the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.source = _default_template(tokenizer.hf_tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._renders_tools: bool | None = None  # found on first use
        self._shows_parts_only: bool | None = None  # found on first use

    @property
    def renders_tools(self) -> bool:
        """True if the template writes tools into the prompt. Raises InvalidRequest if it cannot render at all."""
        if self._renders_tools is None:
            probe = [{"role": "user", "content": "a"}]
            self._renders_tools = self._apply(probe, [_PROBE_TOOL], {}) != self._apply(probe, (), {})
        return self._renders_tools

    @property
    def shows_parts_only(self) -> bool:
        """True if the template leaves out a content that is a text, and shows the text of a part, as SmolVLM's does."""
        if self._shows_parts_only is None:
            probe: Message = {"role": "user", "content": _PROBE_TEXT}
            self._shows_parts_only = not self._shows_probe(probe) and self._shows_probe(_with_content_in_parts(probe))
        return self._shows_parts_only

    def _shows_probe(self, message: Message) -> bool:
        try:
            return _PROBE_TEXT in self._apply_as_given([message])
        except Exception:  # any: the template's own code on a chat that it may not expect
            return False

    def accepts_variable(self, name: str) -> bool:
        """True if the template reads this variable and no other party sets it. Raises InvalidRequest."""
        return name in self._own_variables

    @cached_property
    def _own_variables(self) -> set[str]:
        """Return the variables that the template reads and that only the caller sets."""
        hf_tokenizer = self._tokenizer.hf_tokenizer
        template = hf_tokenizer.chat_template or ""
        environment = Environment(extensions=[GenerationBlock, loopcontrols], autoescape=True)
        read: set[str] = set()
        for source in template.values() if isinstance(template, dict) else [template]:
            try:
                read |= find_undeclared_variables(environment.parse(source))
            except TemplateError as error:
                raise InvalidRequest(f"the model's chat template cannot be read: {error}") from error
        reserved = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        return read - _GLOBAL_NAMES - set(reserved) - set(hf_tokenizer.special_tokens_map)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), variables: Variables = NO_VARIABLES
    ) -> tuple[str, str]:
        """Return the prompt and the generation prompt at its end, which may open a channel. Raises InvalidRequest."""
        text, messages = self._render(messages, tools, variables)
        without = self._apply(messages, tools, variables, add_generation_prompt=False)
        return text, text[_common_prefix_length(text, without) :]

    def render_given(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat that asks for no answer. Raises InvalidRequest."""
        _, messages = self._render(messages, (), {})
        return self._apply(messages, (), {}, add_generation_prompt=False)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any], variables: Variables
    ) -> tuple[str, Sequence[Message]]:
        """Return the prompt, and the messages in the form that the template takes. Raises InvalidRequest."""
        try:
            text = self._apply(messages, tools, variables)
        except TypeError:  # some templates append the arguments to a string
            messages = [_with_json_arguments(message) for message in messages]
            try:
                text = self._apply(messages, tools, variables)
            except TypeError as error:
                raise InvalidRequest(f"the model's chat template cannot render these messages: {error}") from error
        except InvalidRequest:  # gpt-oss's template renders reasoning or content before a call, not both
            joined = [_with_content_in_reasoning(message) for message in messages]
            if joined == list(messages):
                raise
            return self._render(joined, tools, variables)
        return text, messages

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        variables: Variables,
        add_generation_prompt: bool = True,
    ) -> str:
        if self.shows_parts_only:
            messages = [_with_content_in_parts(message) for message in messages]
        return self._apply_as_given(messages, tools, variables, add_generation_prompt)

    def _apply_as_given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        variables: Variables = NO_VARIABLES,
        add_generation_prompt: bool = True,
    ) -> str:
        if not self._tokenizer.hf_tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template; give `prompt` instead of `messages`")
        try:
            return self._tokenizer.hf_tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except (TemplateError, ArithmeticError, ValueError, RecursionError) as error:  # they use the caller's values
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


def _default_template(templates: str | dict[str, str] | None) -> str | None:
    """Return the template named `default` where a tokenizer has several by name."""
    return templates.get("default") if isinstance(templates, dict) else templates


def _common_prefix_length(one: str, other: str) -> int:
    if one.startswith(other):
        return len(other)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _with_content_in_reasoning(message: Message) -> Message:
    """Move the content into the reasoning if the message has both and a call."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not (reasoning and content and message.get("tool_calls")):
        return message
    return {**message, "content": "", "thinking": f"{reasoning}\n\n{content}"}


def _with_content_in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_json_arguments(message: Message) -> Message:
    """Write the arguments of the message's calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_json(arguments: Any) -> str:
    """Write arguments as the `tojson` of transformers' templates does: with every character as itself."""
    return json.dumps(arguments, ensure_ascii=False)
