"""Keep the findings on calls, and write the table of docs/openai.md."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from survey.calls.read_back import Findings

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "survey/results/calls.json"
DOCUMENT = _ROOT / "docs/openai.md"
_BEGIN, _END = "<!-- calls: python -m survey.calls --write -->", "<!-- end of calls -->"


def summary(found: Findings) -> str:
    counts = {name: value for name, value in asdict(found).items() if name != "examples"}
    return ", ".join(f"{value} {name}" for name, value in counts.items())


def write(found: Mapping[str, Findings], seed: int) -> None:
    """Keep the findings, and write the document anew."""
    kept = {
        name: {key: value for key, value in asdict(each).items() if key != "examples"} for name, each in found.items()
    }
    RESULTS.write_text(json.dumps({"seed": seed, "formats": kept}, indent=1) + "\n")
    DOCUMENT.write_text(render(DOCUMENT.read_text()))


def render(text: str) -> str:
    """Return the document with its table made anew from the findings that were kept."""
    before, found_begin, rest = text.partition(_BEGIN)
    _, found_end, after = rest.partition(_END)
    if not (found_begin and found_end):
        raise ValueError(f"{DOCUMENT} has no place for the table: {_BEGIN} ... {_END}")
    return before + "\n".join((_BEGIN, *_table(json.loads(RESULTS.read_text())["formats"]), _END)) + after


def _table(formats: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    titles = ("format", "turns", "calls", "calls read back", "content and reasoning", "markers leaked")
    yield f"| {' | '.join((*titles, 'streamed the same', 'entries aligned'))} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in sorted(formats):
        each = formats[name]
        right = {
            key: f"{100 * (each['turns'] - each[key]) / each['turns']:.4g} %"
            for key in ("misread", "mixed", "streamed_differently", "misaligned")
        }
        cells = (f"`{name}`", each["turns"], each["calls"], right["misread"], right["mixed"], each["leaked"])
        yield f"| {' | '.join(map(str, (*cells, right['streamed_differently'], right['misaligned'])))} |"
