"""Map the names of fields of wire requests to those of a dialect's body. Pure."""

import re
from collections.abc import Callable, Mapping

_REQUEST_FIELD = re.compile(r"(?P<index>\[\d+\])?\.?(?P<path>.*)", re.DOTALL)


def map_field(names: Mapping[str, str], list_field: str = "") -> Callable[[str], str]:
    """Return the function that maps `[1].prompt[0]` to `text[1][0]`, given `{"prompt": "text"}` and `prompt`.

    `list_field` is the field of a request that the dialect's body has as a list: the index of the request moves behind
    its name. A field that is not in `names` keeps its name.
    """

    def field_name(field: str) -> str:
        index, path = _REQUEST_FIELD.fullmatch(field).groups(default="")  # type: ignore[union-attr]
        for name, renamed in names.items():
            if path == name or path.startswith((f"{name}[", f"{name}.")):
                return renamed + (index if name == list_field else "") + path[len(name) :]
        return path

    return field_name
