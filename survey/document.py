"""Write the tables of docs/numbers.md that follow from the survey's files.

    python -m survey.document

They are engine/model/surveyed_settings/*.json (`python -m survey --write`), survey/results/ways.json
(`python -m survey.ways --write`) and survey/results/quantised.json (`python -m survey.quantised --write`). Nothing is
computed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
DOCUMENT = _ROOT / "docs/numbers.md"
_SETTINGS = _ROOT / "engine/model/surveyed_settings"
_RESULTS = _ROOT / "survey/results"
_LONGEST_REASON = 110  # characters
_MAX_NAMES = 8  # settings named in a cell
Found = dict[str, Any]


def render(text: str) -> str:
    """Return the document with its tables made anew. A table stands between two comments that name it."""
    for name, table in (("architectures", architectures()), ("quantised", quantised())):
        begin, end = f"<!-- {name}: python -m survey.document -->", f"<!-- end of {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{DOCUMENT} has no place for the table of {name}: {begin} ... {end}")
        text = before + "\n".join((begin, *table, end)) + after
    return text


def architectures() -> Iterator[str]:
    """Yield the lines of the table of architectures."""
    ways = _read(_RESULTS / "ways.json")
    settings = {path.stem: _read(path) for path in sorted(_SETTINGS.glob("*.json"))}
    yield "| architecture | rows run | float32 | 16 bits | mended | followed only in part |"
    yield "|---|---|---|---|---|---|"
    for name in sorted(ways.keys() | settings.keys()):
        bases = ways.get(name, {})
        cells = [
            f"`{name}`",
            _rows_run(bases),
            _worst(bases, "errors", ".0e"),
            _worst(bases, "ratios", ".2f"),
            ", ".join(sorted({f"`{kind}`" for found in bases.values() for kind in found.get("replaced", [])})),
            _restricted(settings.get(name)),
        ]
        yield f"| {' | '.join(cells)} |"


def quantised() -> Iterator[str]:
    """Yield the lines of the table of quantised formats."""
    findings = _read(_RESULTS / "quantised.json")
    models = list(next(iter(findings.values())))
    yield f"| format | {' | '.join(f'{model}: MLX | unquantised, rms | largest' for model in models)} |"
    yield f"|---|{'---|---|---|' * len(models)}"
    for name, by_model in findings.items():
        cells = [
            f"{by_model[model][key]:.0e}" if key == "error" else f"{by_model[model][key]:.2g}"
            for model in models
            for key in ("error", "rms", "largest")
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _rows_run(bases: dict[str, Found]) -> str:
    """Say how the configurations of an architecture are served, or why they are refused."""
    if not bases:
        return "not tried"
    served = {_way(found): None for found in bases.values() if found.get("mode")}
    refused = {name: found["note"] for name, found in bases.items() if not found.get("mode")}
    if not served:
        return f"refused: {_shorten(next(iter(refused.values())))}"
    return "; ".join([*served, *(f"`{name}` refused: {_shorten(reason)}" for name, reason in refused.items())])


def _way(found: Found) -> str:
    note = found.get("note", "")
    if found["mode"] == "one row at a time":
        return f"one at a time: {_shorten(note.rpartition(': ')[2])}"
    way = "in batches"
    if "prompts of different lengths" in note:
        way += ", prompts of one length together"
    return way + (", prompts not shared" if "computes its whole prompt" in note else "")


def _worst(bases: dict[str, Found], key: str, form: str) -> str:
    values = [value for found in bases.values() for value in found.get(key, {}).values()]
    return f"{max(values):{form}}" if values else ""


def _restricted(settings: Found | None) -> str:
    """Name the settings that are not followed at every value."""
    if settings is None:
        return "not surveyed"
    names = [f"`{name}`" for name in sorted(settings["only"].keys() | settings["excepted"].keys())]
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _shorten(reason: str) -> str:
    reason = " ".join(reason.replace("|", "/").split())
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON].rpartition(" ")[0] + " ..."


def _read(path: Path) -> Found:
    found: Found = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
