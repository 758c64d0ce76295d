"""Fold the findings of a survey into the file that the engine reads: surveyed_settings/<model type>.json."""

import json
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from survey.run import Finding

FOLDER = Path(__file__).parent.parent / "engine/model/surveyed_settings"


def fold(findings: Iterable[Finding]) -> dict[str, object]:
    """Return the settings that are followed at any value, and those that are followed only at some.

    followed        every value that was tried agrees with transformers
    only            the values that agree, of the other settings, beside the default
    not_by_default  settings that are not even followed at their default
    """
    by_setting: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.setting:
            by_setting[finding.setting].append(finding)
    followed: list[str] = []
    only: dict[str, list[object]] = {}
    not_by_default: list[str] = []
    for name, found in sorted(by_setting.items()):
        is_open = not isinstance(found[0].value, str)  # there are more numbers than those tried, but no more words
        if is_open and all(finding.outcome == "agrees" for finding in found):
            followed.append(name)
            continue
        bad = [finding.value for finding in found if finding.outcome != "agrees"]
        only[name] = [
            finding.value
            for finding in found
            if finding.outcome == "agrees" and not finding.is_default and finding.value not in bad
        ]
        if any(finding.is_default and finding.outcome != "agrees" for finding in found):
            not_by_default.append(name)
    return {"followed": followed, "only": only, "not_by_default": not_by_default}


def write(model_type: str, findings: Iterable[Finding]) -> None:
    """Write the family's file."""
    versions = {name: version(name) for name in ("mlx-lm", "transformers")}
    text = json.dumps({"versions": versions, **fold(findings)}, indent=1)
    (FOLDER / f"{model_type}.json").write_text(text + "\n")
