"""Find calls that a degraded model writes as text, outside its own format: the repair that a setting asks for. No MLX.

    [Calling tool: look({"place": "Bern"})]
    [TOOL_CALL]{"name": "look", "arguments": {"place": "Bern"}}[/TOOL_CALL]
    <tool_call>{"name": "look", "arguments": {"place": "Bern"}}</tool_call>      in letters, where that is no token
    ```json
    {"name": "look", "arguments": {"place": "Bern"}}
    ```

Such a text is a call only if it begins a line and nothing but spaces follows it in its last token. A fenced block is an
example unless it ends the answer. To add a form, add it to _FORMS.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from scorepool.engine.text.chat.call_formats.call_format import Call

MAX_BYTES = 65_536  # of a text that may be a call
_MAX_CLOSINGS = 64  # in such a text; each costs an attempt to parse it
_CALLING = re.compile(r"\[Calling tool:\s*(?P<name>[\w.-]+)\s*\((?P<arguments>.*)\)\s*\]", re.DOTALL)
_CALLING_BEGINNING = re.compile(rb"\[Calling tool:\s*+[\w.-]{0,64}\s*+(\(\s*+(\{|\)|$)|$)")
_ARROWS = re.compile(
    r"\{\s*tool\s*=>\s*\"(?P<name>[^\"]+)\"\s*,\s*args\s*=>\s*\{(?P<arguments>.*)\}\s*+(?:,\s*+)?\}", re.DOTALL
)
_FLAG = re.compile(r"\s*--(?P<name>[\w.-]+)\s+")
_NAMES = ("name", "tool", "function")
_ARGUMENTS = ("arguments", "parameters", "args")

Decision = Literal["content", "held", "released", "calls"]


def _parse_calling(text: str) -> list[Call]:
    found = _CALLING.fullmatch(text)
    if found is None:
        raise ValueError("this is no call")
    return [{"name": found["name"], "arguments": json.loads(found["arguments"].strip() or "{}")}]


def _parse_json(text: str) -> list[Call]:
    """Return the call of a JSON object that has a name, arguments and nothing else, or those of a list."""
    found = json.loads(text)
    return [_to_call(each) for each in (found if isinstance(found, list) else [found])]


def _to_call(found: Any) -> Call:
    names = [key for key in _NAMES if key in found]
    arguments = [key for key in _ARGUMENTS if key in found]
    if len(found) != 2 or not names or not arguments:
        raise ValueError("this is no call")
    return {"name": found[names[0]], "arguments": found[arguments[0]]}


def _parse_json_or_arrows(text: str) -> list[Call]:
    """Return the calls of JSON, or the call of MiniMax's {tool => "name", args => {--key "value"}}."""
    found = _ARROWS.fullmatch(text)
    if found is None:
        return _parse_json(text)
    arguments: dict[str, Any] = {}
    decoder, body, at = json.JSONDecoder(), found["arguments"], 0
    while flag := _FLAG.match(body, at):
        arguments[flag["name"]], at = decoder.raw_decode(body, flag.end())
    if body[at:].strip():
        raise ValueError("this is no list of arguments")
    return [{"name": found["name"], "arguments": arguments}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A way to write a call as text. `parse` gets the text between opening and closing, or all of it."""

    opening: bytes
    closing: bytes
    parse: Callable[[str], list[Call]]
    is_whole: bool = False  # `parse` gets opening and closing too
    must_end_answer: bool = False
    beginning: re.Pattern[bytes] | None = None  # that the text matches while it grows

    def calls_in(self, text: bytes) -> list[Call]:
        """Return the calls. Raises ValueError, TypeError, RecursionError."""
        body = text if self.is_whole else text.removeprefix(self.opening).removesuffix(self.closing)
        calls = self.parse(body.decode().strip())
        if not calls or not all(isinstance(call["name"], str) for call in calls):
            raise ValueError("this is no call")
        return calls


_FORMS = (
    _Form(opening=b"[Calling tool:", closing=b"]", parse=_parse_calling, is_whole=True, beginning=_CALLING_BEGINNING),
    _Form(opening=b"[TOOL_CALL]", closing=b"[/TOOL_CALL]", parse=_parse_json_or_arrows),
    _Form(opening=b"<tool_call>", closing=b"</tool_call>", parse=_parse_json),
    *(
        _Form(opening=b"```" + language + b"\n", closing=b"\n```", parse=_parse_json, must_end_answer=True)
        for language in (b"json", b"tool_call", b"")
    ),
)


def parse_text_calls(text: str, _: Any) -> list[Call]:
    """Return the calls of a text that TextCalls found. Raises ValueError, TypeError, RecursionError."""
    written = text.strip().encode()
    form = next((form for form in _FORMS if written.startswith(form.opening)), None)
    if form is None:
        raise ValueError("this is no call")
    return form.calls_in(written)


class TextCalls:
    """What the content of one answer holds back, because it is a call in one of the forms, or may become one."""

    def __init__(self) -> None:
        self.num_held = 0  # tokens
        self.complete: list[tuple[int, int]] = []  # of the tokens that are held, [start, end) of each complete call
        self._is_line_start = True
        self._text = b""  # of the call that has begun and is not complete
        self._start = 0  # of the tokens that are held, the first of this text
        self._form: _Form | None = None
        self._num_closings = 0
        self._must_end_answer = False  # complete calls are calls only if nothing follows

    def restart(self) -> None:
        """Begin a new content: nothing is held, and it is the start of a line."""
        self.__init__()  # type: ignore[misc]

    def read(self, token: bytes) -> Decision:
        """Read the next token of the content, and say what becomes of it.

        content     it is content, and nothing is held
        held        it is held
        released    it and all that was held are content
        calls       the tokens of `complete` are calls; nothing else of the held tokens is content
        """
        if self._form is None and not self._may_begin(token):
            return self._give_up(self._text + token)
        self._text += token
        self.num_held += 1
        if self._form is None:
            self._form = _form_of(self._text.lstrip())
            if self._form is None:
                return "held"  # the text may become an opening
        if not self._may_be_call(self._form):
            return self._give_up(self._text)
        return self._try_to_complete(self._form, token)

    def end(self, is_last: bool) -> Decision:
        """Say what becomes of the held tokens at the end of the content. `is_last`: and of the answer."""
        return "calls" if is_last and self.complete and not self._text.strip() else "released"

    def _may_begin(self, token: bytes) -> bool:
        """True if the text with the token is the beginning of an opening, or begins with one, at the start of a line.

        Spaces alone are content, unless they follow a call that must be the last of the answer.
        """
        spaces = token[: len(token) - len(token.lstrip())]
        if not (self._text or self._is_line_start or b"\n" in spaces):
            return False
        text = (self._text + token).lstrip()
        if not text:
            return bool(self.complete)
        return any(form.opening.startswith(text) or text.startswith(form.opening) for form in _FORMS)

    def _may_be_call(self, form: _Form) -> bool:
        text = self._text.lstrip()
        if len(text) > MAX_BYTES or self._num_closings > _MAX_CLOSINGS:
            return False
        return form.beginning is None or form.beginning.match(text) is not None

    def _try_to_complete(self, form: _Form, token: bytes) -> Decision:
        text = self._text.strip()
        if not token.strip() or not text.endswith(form.closing) or len(text) < len(form.opening) + len(form.closing):
            return "held"
        self._num_closings += 1
        try:
            form.calls_in(text)
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._give_up(self._text) if form.must_end_answer else "held"
        self.complete.append((self._start, self.num_held))
        self._must_end_answer |= form.must_end_answer
        self._text, self._start, self._form, self._num_closings = b"", self.num_held, None, 0
        self._is_line_start = True  # another call may follow at once
        return "held" if self._must_end_answer else "calls"

    def _give_up(self, text: bytes) -> Decision:
        """Stop holding: what was held is content, which ends with this text."""
        was_held, was_line_start = self.num_held > 0, self._is_line_start
        self.restart()
        _, newline, line = text.rpartition(b"\n")
        self._is_line_start = not line.strip() and (bool(newline) or was_line_start)
        return "released" if was_held else "content"


def _form_of(text: bytes) -> _Form | None:
    """Return the form that a text begins with."""
    return next((form for form in _FORMS if text.startswith(form.opening)), None)
