"""Fold the findings of a survey into the file that the engine reads: surveyed_settings/<model type>.json."""

import json
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TypeGuard

from survey.run import Finding

FOLDER = Path(__file__).parent.parent / "engine/model/surveyed_settings"


def fold(findings: Iterable[Finding]) -> dict[str, object]:
    """Return the settings that are followed at any value, and those that are followed only at some.

    followed        every value that was tried agrees with transformers
    excepted        settings that are followed but for these values
    only            the values that agree, of the other settings; what an absent setting means is right, too
    not_by_default  settings that are not even followed at their default
    """
    by_setting: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.setting:
            by_setting[finding.setting].append(finding)
    followed: list[str] = []
    only: dict[str, list[object]] = {}
    excepted: dict[str, list[int]] = {}
    not_by_default: list[str] = []
    for name, found in sorted(by_setting.items()):
        wrong = [finding for finding in found if finding.is_wrong]
        agreeing = [finding.value for finding in found if finding.outcome == "agrees"]
        # There are more numbers than those tried, but no more words, unless any word will do or a rule of the engine
        # knows them: then it refused some. And if a setting was always unset, nothing was tried.
        is_number = not isinstance(found[0].value, str)
        has_rule = name.endswith("rope_type") or any(finding.outcome == "refused" for finding in found)
        is_open = (is_number or has_rule or "unheard_of" in agreeing) and any(
            finding.value is not None for finding in found
        )
        if is_open and not wrong:  # what the engine refuses by itself needs no table
            followed.append(name)
            continue
        if any(finding.is_default for finding in wrong):
            not_by_default.append(name)
        wrong_values = [finding.value for finding in wrong]
        if _are_special_cases(wrong_values, agreeing):
            excepted[name] = sorted(set(wrong_values))
            continue
        only[name] = []
        for finding in found:
            is_right = finding.outcome == "agrees" and finding.value not in wrong_values
            if is_right and finding.value not in only[name]:
                only[name].append(finding.value)
    return {"followed": followed, "excepted": excepted, "only": only, "not_by_default": not_by_default}


def _are_special_cases(wrong: list[object], agreeing: list[object]) -> TypeGuard[list[int]]:
    """Return whether only 0 or 1 of something is wrong: code treats a single expert apart, and right is any more."""
    counts = [value for value in agreeing if type(value) is int]
    return all(type(value) is int and value <= 1 for value in wrong) and min(counts, default=0) > 1


def write(model_type: str, findings: Iterable[Finding]) -> None:
    """Write the family's file."""
    versions = {name: version(name) for name in ("mlx-lm", "transformers")}
    text = json.dumps({"versions": versions, **fold(findings)}, indent=1)
    (FOLDER / f"{model_type}.json").write_text(text + "\n")
