"""Generate turns at random: tools with nested schemas, calls of them, and texts that look like markers."""

import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# In a text, this character splits what would be a marker: it is encoded as ordinary text, as a model may write it.
SPLIT = "\ue000"
_WORDS = [
    "a",
    "Zürich",
    "東京",
    "🙂",
    "\u0301",
    "5",
    "-1.5",
    "true",
    "null",
    "x=1",
    "it's",
    "C:\\new",
    "\\",
    "\\n",
    "\\u00e4",
]
_SIGNS = [*"\"'`{}[]()<>,:;=/&|# \n\t", "\n\n", "  ", '"""', "'''", "```json\n", "\n```", "{}", "[]", "</", "<|", "|>"]
_PIECES = _WORDS + _SIGNS
_MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|tool_call|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<tool_call|>",
]
_MARKERS += ["<function=look>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_value>", "<|call|>"]
_MARKERS += [
    "<|python_end|>",
    '<|"|>',
    "<escape>",
    "</TOOLCALL>",
    "<tool_calls>",
    "functools[",
    "[/TOOL_CALL]",
    "<eos>",
]
_MARKERS += [
    "<｜tool▁call▁end｜>",
    "<|tool_call_end|>",
    "</invoke>",
    "</minimax:tool_call>",
    "<|channel|>",
    "<|im_end|>",
]
_MARKERS += ["<longcat_arg_key>", "</longcat_arg_value>", "</seed:tool_call>", "[look(x=1)]", "<|start|>", "<|end|>"]
_MARKERS += ["</｜DSML｜parameter>", "<｜DSML｜tool_calls>", "</｜DSML｜function_calls>", ">>>", ">>> look"]
_MARKERS += [
    "<tool_calls>",
    "<function_call>",
    "<function_calls>",
    "<|END_ACTION|>",
    "<|tools_suffix|>",
    "[{",
    "]<]minimax[>[</x>",
]
_NAMES = ["look", "count_up", "get_weather", "search", "f", "zoom_in_2", "send_email", "x"]
_KEYS = ["place", "x", "unit", "deep", "a_b", "query", "Limit", "n1"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a model answers. Texts and strings may hold SPLIT."""

    tools: list[dict[str, Any]]
    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


def turns(seed: int, num: int, cannot_write: str = "") -> Iterator[Turn]:
    """Yield turns. No string of their arguments holds a match of `cannot_write`."""
    generator = _Generator(random.Random(seed), cannot_write)  # noqa: S311
    for _ in range(num):
        yield generator.turn()


def without_split(value: Any) -> Any:
    """Return the value as a caller gets it."""
    match value:
        case str():
            return value.replace(SPLIT, "")
        case list():
            return [without_split(each) for each in value]
        case dict():
            return {without_split(key): without_split(each) for key, each in value.items()}
        case _:
            return value


class _Generator:
    def __init__(self, rng: random.Random, cannot_write: str) -> None:
        self._rng = rng
        self._cannot_write = re.compile(cannot_write) if cannot_write else None

    def turn(self) -> Turn:
        rng = self._rng
        tools = [self._tool(name) for name in rng.sample(_NAMES, rng.randint(1, 4))]
        calls = [self._call(rng.choice(tools)) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        reasoning, content = (self._prose() if rng.random() < 0.6 else "" for _ in range(2))
        return Turn(tools, reasoning, content, calls)

    def _tool(self, name: str) -> dict[str, Any]:
        parameters = self._object(depth=0)
        return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}

    def _call(self, tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        function = tool["function"]
        return function["name"], self._value(function["parameters"])

    def _object(self, depth: int) -> dict[str, Any]:
        keys = self._rng.sample(_KEYS, self._rng.choice([0, 1, 1, 2, 3, 4] if depth == 0 else [1, 2]))
        required = [key for key in keys if self._rng.random() < 0.6]
        return {"type": "object", "properties": {key: self._schema(depth + 1) for key in keys}, "required": required}

    def _schema(self, depth: int) -> dict[str, Any]:
        kinds = ["string"] * 6 + ["integer", "number", "boolean", "enum", "nullable"]
        kinds += ["array", "object"] if depth < 4 else []
        match self._rng.choice(kinds):
            case "enum":
                return {"type": "string", "enum": ["km", "a b", "ä,ö"]}
            case "nullable":
                return {"anyOf": [{"type": "string"}, {"type": "null"}]}
            case "array":
                return {"type": "array", "items": self._schema(depth + 1)}
            case "object":
                return self._object(depth)
            case kind:
                return {"type": kind}

    def _value(self, schema: dict[str, Any]) -> Any:
        rng = self._rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "anyOf" in schema:
            return None if rng.random() < 0.4 else f"{self._text()}."  # no other value ends with a point
        match schema["type"]:
            case "object":
                required, properties = schema["required"], schema["properties"]
                kept = [key for key in properties if key in required or rng.random() < 0.5]
                return {key: self._value(properties[key]) for key in kept}
            case "array":
                return [self._value(schema["items"]) for _ in range(rng.randint(0, 3))]
            case "string":
                return self._text()
            case "integer":
                return rng.choice([0, 1, -7, 10**12, rng.randint(-99, 99)])
            case "number":
                return rng.choice([0.5, -1.25, 3, 1e-07, 2.5e20, rng.random()])
            case _:
                return rng.random() < 0.5

    def _text(self) -> str:
        """Return any text, often with what looks like a marker."""
        while True:
            text = "".join(self._piece() for _ in range(self._rng.choice([0, 1, 1, 2, 3, 5, 8])))
            if self._cannot_write is None or not self._cannot_write.search(without_split(text)):
                return text

    def _piece(self) -> str:
        rng = self._rng
        if rng.random() < 0.25:
            return split(rng.choice(_MARKERS))
        return rng.choice(_PIECES) if rng.random() < 0.8 else rng.choice(string.ascii_letters)

    def _prose(self) -> str:
        """Return a text that begins and ends with a word: templates add and remove spaces around texts."""
        words = [self._rng.choice(["I look.", "Ä", "then", "🙂", "1 < 2", "a\nb", self._piece()]) for _ in range(4)]
        return f"Well {' '.join(words)} so"


def split(marker: str) -> str:
    """Split a text so that neither it nor a token in it is written as that token."""
    return f"{marker[:1]}{SPLIT}{marker[1:]}".replace("DSML", f"DS{SPLIT}ML")
