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
        wrong = [finding for finding in found if finding.is_wrong]
        agreeing = [finding.value for finding in found if finding.outcome == "agrees"]
        # There are more numbers than those tried, but no more words, unless any word will do or a rule of the engine
        # knows them: then it refused some. And if a setting was always unset, nothing was tried.
        is_number = not isinstance(found[0].value, str)
        has_rule = any(finding.outcome == "refused" for finding in found)
        is_open = (is_number or has_rule or "unheard_of" in agreeing) and any(
            finding.value is not None for finding in found
        )
        if is_open and not wrong:  # what the engine refuses by itself needs no table
            followed.append(name)
            continue
        wrong_values = [finding.value for finding in wrong]
        only[name] = []
        for finding in found:
            is_right = finding.outcome == "agrees" and finding.value not in wrong_values
            if is_right and not finding.is_default and finding.value not in only[name]:
                only[name].append(finding.value)
        if any(finding.is_default for finding in wrong):
            not_by_default.append(name)
    return {"followed": followed, "only": only, "not_by_default": not_by_default}


def write(model_type: str, findings: Iterable[Finding]) -> None:
    """Write the family's file."""
    versions = {name: version(name) for name in ("mlx-lm", "transformers")}
    text = json.dumps({"versions": versions, **fold(findings)}, indent=1)
    (FOLDER / f"{model_type}.json").write_text(text + "\n")
