"""A chat to the text that a model is prompted with, by its own template."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from scorepool.engine.errors import InvalidRequest

Message = Mapping[str, Any]  # OpenAI's, but for arguments, which are an object
Variables = Mapping[str, bool | int | float | str | None]
NO_VARIABLES: Variables = {}
_TRIAL_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    def __init__(self, tokenizer: Any, lock: Lock) -> None:
        """`tokenizer` is a Hugging Face one, to be used under `lock`."""
        self._tokenizer = tokenizer
        self._lock = lock
        self._knows_tools: bool | None = None  # until somebody asks

    @property
    def knows_tools(self) -> bool:
        """Whether it writes them down. Raises InvalidRequest."""
        if self._knows_tools is None:
            trial = [{"role": "user", "content": "a"}]
            self._knows_tools = self._apply(trial, [_TRIAL_TOOL], {}) != self._apply(trial, (), {})
        return self._knows_tools

    def knows(self, variable: str) -> bool:
        """Whether a caller may give it: the template reads it, and nobody else sets it."""
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if variable in own or variable == "messages" or variable in self._tokenizer.special_tokens_map:
            return False
        template = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in texts)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), variables: Variables = NO_VARIABLES
    ) -> tuple[str, str]:
        """The text, and what it ends with to make the model answer, which may open a channel. Raises InvalidRequest."""
        try:
            text = self._apply(messages, tools, variables)
        except TypeError:  # some templates append arguments to a text
            messages = [_with_written_arguments(message) for message in messages]
            try:
                text = self._apply(messages, tools, variables)
            except TypeError as error:
                raise InvalidRequest(f"the model's chat template cannot write these messages: {error}") from error
        except InvalidRequest:  # gpt-oss's writes reasoning or content before a call, not both
            joined = [_with_content_in_reasoning(message) for message in messages]
            if joined == list(messages):
                raise
            return self.render(joined, tools, variables)
        before = self._apply(messages, tools, variables, add_generation_prompt=False)
        return text, text[_num_common(text, before) :]

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        variables: Variables,
        add_generation_prompt: bool = True,
    ) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template; give `prompt` instead of `messages`")
        try:
            with self._lock:
                return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                    list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
        except (TemplateError, ArithmeticError, ValueError) as error:  # templates calculate with what they are given
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


def _num_common(text: str, before: str) -> int:
    """How many characters both begin with."""
    if text.startswith(before):
        return len(before)
    pairs = enumerate(zip(text, before, strict=False))  # the shorter may be all that is common
    return next((place for place, (one, other) in pairs if one != other), min(len(text), len(before)))


def _with_content_in_reasoning(message: Message) -> Message:
    """Where it has both and a call: what was said before a call was no answer."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not (reasoning and content and message.get("tool_calls")):
        return message
    return {**message, "content": "", "thinking": f"{reasoning}\n\n{content}"}


def _with_written_arguments(message: Message) -> Message:
    """With the arguments of its calls as JSON."""
    from_calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": from_calls} if from_calls else message
