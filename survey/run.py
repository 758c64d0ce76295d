"""Survey one family: its base configurations, then each setting changed alone."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from scorepool.engine.model.contradictions import refuse_contradictions
from scorepool.engine.model.surveyed import Flat, default_of, flatten
from survey import reference
from survey.families.family import Family
from survey.measure import Loader, Served
from survey.mutations import Config, Mutator
from survey.own_settings import own_settings

TOLERANCE = 1e-3  # nats, float32
LENGTHS = (9, 70)  # tokens of the rows; the second crosses windows and original lengths


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one configuration."""

    family: str
    base: str  # name of the base configuration
    setting: str  # the changed setting, dotted in a section; "" for the base itself
    value: object
    is_default: bool  # the value that it has if config.json leaves it out
    matters: bool  # transformers computes something else than for the base
    outcome: str  # "agrees", "differs", "refused", "crashes", or "ambiguous"
    detail: str  # nats, or the reason

    @property
    def is_wrong(self) -> bool:
        return self.outcome in ("differs", "crashes")


class NotBuilt(Exception):
    """transformers refuses the configuration or fails on it, or its values contradict each other."""


def survey(family: Family, seed: int, *, checks_settings: bool, only: str = "") -> Iterator[Finding]:
    """Yield a finding for each base and each change that transformers can compute.

    Where a further base is wrong, the settings that it changes are to blame: no others are tried beside them. If the
    first is wrong, no setting is.
    """
    first: Flat = {}
    with Loader() as loader:
        for base_name, settings in family.bases().items():
            base = Measured(family, settings, seed, loader, checks_settings)
            found = base.finding(base_name, "", None, None)
            yield found
            canonical = {"model_type": settings["model_type"], **base.config.to_dict()}
            flat = flatten(canonical)
            is_right = found.outcome == "agrees"
            for setting, value in flat.items():
                if is_right or (first and (setting not in first or first[setting] != value)):
                    yield base.finding(base_name, setting, value, base)
            if not is_right:
                continue
            first = first or flat
            defaults = reference.build_config({"model_type": settings["model_type"]}).to_dict()
            known: dict[str, Measured | None] = {}
            mutator = Mutator(seed, defaults, own_settings(base.published), family.section)
            for setting, value, changed in mutator.mutations(canonical):
                if only and not setting.startswith(only):
                    continue
                key = json.dumps(changed, sort_keys=True, default=str)
                if key not in known:  # one configuration shows several parameters of a rotary scaling
                    known[key] = Measured.of(family, changed, seed, loader, checks_settings, base)
                if (measured := known[key]) is not None:
                    yield measured.finding(base_name, setting, value, base)


class Measured:
    """One configuration in transformers and in the engine."""

    def __init__(
        self,
        family: Family,
        settings: Config,
        seed: int,
        loader: Loader,
        checks_settings: bool,
        base: "Measured | None" = None,
    ) -> None:
        self.family = family
        self.settings = settings
        folder = Path(tempfile.mkdtemp(prefix="survey-"))
        try:
            self.config = reference.build_config(settings)
            self.model = reference.build_model(self.config, seed)
            self.has_bases_weights = base is not None and reference.has_same_weights(self.model, base.model)
            self.rows = _rows(seed, self.config)
            self.right = [reference.logprobs(self.model, row) for row in self.rows]
            self.model.save_pretrained(folder)
            family.convert(folder)
            self.published: Config = json.loads((folder / "config.json").read_text())
            refuse_contradictions(self.published)
        except Exception as error:  # any: transformers on an impossible configuration
            shutil.rmtree(folder)
            raise NotBuilt(f"{type(error).__name__}: {error}") from error
        self.served: Served = loader.serve(folder, self.rows, checks_settings=checks_settings)
        shutil.rmtree(folder)
        self.outcome = self._outcome()

    @classmethod
    def of(cls, *args: Any) -> Self | None:
        """Return the configuration, measured; None if transformers cannot compute it."""
        try:
            return cls(*args)
        except NotBuilt:
            return None

    def finding(self, base_name: str, setting: str, value: object, base: "Measured | None") -> Finding:
        matters = base is None or not self.has_bases_weights or _difference(self.right, base.right) > 1e-7
        is_default = bool(setting) and default_of(self.settings, setting) == value
        name = self.family.prefix + setting if setting else ""
        return Finding(self.family.model_type, base_name, name, value, is_default, matters, *self.outcome)

    def _outcome(self) -> tuple[str, str]:
        if self.served.refusal:
            return "refused", self.served.refusal
        if self.served.crash:
            return "crashes", self.served.crash
        right, rows = self.right, self.rows
        if any(len(ours) < len(row) for ours, row in zip(self.served.logprobs, rows, strict=True)):
            # the context is limited; a shorter row may have other positions
            rows = [row[: len(ours)] for ours, row in zip(self.served.logprobs, rows, strict=True)]
            right = [reference.logprobs(self.model, row) for row in rows]
        error = _difference(self.served.logprobs, right)
        if error <= TOLERANCE:
            return "agrees", f"{error:.1e}"
        others = reference.other_roundings(self.model, rows)
        is_ambiguous = any(_difference(right, other) > TOLERANCE for other in others)
        return "ambiguous" if is_ambiguous else "differs", f"{error:.1e}"


def _rows(seed: int, config: Any) -> list[list[int]]:
    draw = Random(seed)  # noqa: S311
    vocab_size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


def _difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Return the largest difference; infinite where either is NaN, or one is infinite."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        both = np.isfinite(a) & np.isfinite(b)
        if (np.isfinite(a) != np.isfinite(b)).any() or (np.isnan(a) | np.isnan(b)).any():
            return float("inf")
        worst = max(worst, float(np.abs(a[both] - b[both]).max(initial=0.0)))
    return worst
