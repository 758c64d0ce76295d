"""Where a dialect's requests are refused: fields of what it makes of them, in its own words. Pure."""

import re
from collections.abc import Callable, Mapping

_OF_ONE = re.compile(r"(?P<index>\[\d+\])?\.?(?P<path>.*)", re.DOTALL)


def in_words(names: Mapping[str, str], listed: str = "") -> Callable[[str], str]:
    """From `[1].prompt[0]` to `text[1][0]` with `{"prompt": "text"}`, where the dialect has a list of what is `listed`.

    A field that `names` does not know has the same name there.
    """

    def to_param(field: str) -> str:
        index, path = _OF_ONE.fullmatch(field).groups(default="")  # type: ignore[union-attr]
        for name, word in names.items():
            if path == name or path.startswith((f"{name}[", f"{name}.")):
                return word + (index if name == listed else "") + path[len(name) :]
        return path

    return to_param
