"""Write a regular expression in llguidance's dialect of Lark, and say where one is wrong. Pure.

The whole content matches it. The syntax is that of Rust's crate `regex`: `^` and `$` may stand at its ends only, and
there are no look-around and no back references.
"""

import re

from scorepool.engine.errors import InvalidRequest

_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
_PARSE_ERROR = re.compile(r"regex parse error:\n    (?P<pattern>.*)\n    (?P<before> *)\^.*\nerror: (?P<message>.*)")
_OTHER_ERROR = re.compile(r"\(in regex\): (?P<message>[^;\n]*)")


def regex_rule(pattern: str) -> str:
    """Return the regular expression as a terminal. Raises InvalidRequest."""
    if not pattern:
        raise InvalidRequest("it is empty; expected a regular expression")
    pieces = _pieces(pattern)
    if pieces[-1] == "\\":
        raise InvalidRequest(f"character {len(pattern)}: a backslash that escapes nothing")
    return f"/{''.join(_ESCAPED.get(piece, piece) for piece in pieces)}/"


def explain_regex(pattern: str, error: str) -> str | None:
    """Return what llguidance's error says about the expression, and where; None if it says nothing of the kind."""
    if found := _PARSE_ERROR.search(error):
        return f"character {_given_place(pattern, len(found['before'])) + 1}: {found['message']}"
    if found := _OTHER_ERROR.search(error):
        return found["message"]
    return None


def _given_place(pattern: str, place: int) -> int:
    """Return the index in the pattern of an index in the terminal, which the error shows."""
    given = shown = 0
    for piece in _pieces(pattern):
        if shown >= place:
            break
        given += len(piece)
        shown += len(_ESCAPED.get(piece, piece))
    return given


def _pieces(pattern: str) -> list[str]:
    """Return the escapes and the other characters of a pattern."""
    return re.findall(r"\\.|.", pattern, re.DOTALL)
