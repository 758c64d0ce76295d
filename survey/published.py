"""Serve the settings of published checkpoints in tiny sizes, and compare with transformers.

    python -m survey.published [MODEL ...]

published.json has the settings of config.json by the checkpoint's name on the hub, with dashes. What is a number of
something comes from the family's tiny model; factors, switches, names and rotary scalings are the checkpoint's.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scorepool.engine.model.surveyed import SECTIONS, transformers_type
from survey import reference
from survey.families import FAMILIES
from survey.families.family import Family
from survey.measure import Loader
from survey.mutations import Config, longrope_factors
from survey.run import Measured, NotBuilt

PUBLISHED: dict[str, Config] = json.loads((Path(__file__).parent / "published.json").read_text())
_LENGTH = 32  # of the rotary scalings: shorter than the rows
_ROPES = ("rope_parameters", "rope_scaling")


def measure(name: str, loader: Loader) -> Measured:
    """Serve a checkpoint's settings in the sizes of its family's first tiny model that can have them.

    Raises NotBuilt.
    """
    published = PUBLISHED[name]
    family = FAMILIES[transformers_type(published)]
    if "text_config" in published and not family.section:
        published = published["text_config"]
    elif family.section and family.section not in published:  # the first releases of Qwen2-VL
        published = {family.section: published}
    *others, last = family.bases().values()
    for tiny in others:
        try:
            return _measure(family, tiny, published, loader)
        except NotBuilt:
            continue
    return _measure(family, last, published, loader)


def _measure(family: Family, tiny: Config, published: Config, loader: Loader) -> Measured:
    sizes = reference.build_config(tiny).to_dict()
    settings = _shrink(published, sizes) | {"model_type": tiny["model_type"]}
    if family.section:
        settings[family.section] = tiny[family.section] | settings[family.section]
    return Measured(family, tiny | settings, 0, loader, checks_settings=True)


def _shrink(published: Config, tiny: Config) -> Config:
    settings: Config = {}
    for key, value in published.items():
        if key in _ROPES and isinstance(value, dict):
            settings[key] = _shrink_rope(
                value, tiny | {"partial_rotary_factor": published.get("partial_rotary_factor", 1.0)}
            )
        elif key in SECTIONS and isinstance(value, dict):
            settings[key] = _shrink(value, tiny.get(key) or {})
        elif _is_factor(value):
            settings[key] = value
        elif tiny.get(key) is not None:
            settings[key] = tiny[key]
    return settings


def _is_factor(value: Any) -> bool:
    return isinstance(value, bool | float | str)


def _shrink_rope(rope: Config, tiny: Config) -> Config:
    shrunk: Config = {
        key: _shrink_rope(value, tiny) if isinstance(value, dict) else value for key, value in rope.items()
    }
    if "short_factor" in shrunk:
        dims = len(longrope_factors(rope, tiny)["short_factor"])
        shrunk |= {key: shrunk[key][:dims] for key in ("short_factor", "long_factor")}
    if "mrope_section" in shrunk:
        shrunk["mrope_section"] = tiny["rope_parameters"]["mrope_section"]
    if "original_max_position_embeddings" in shrunk:
        shrunk["original_max_position_embeddings"] = _LENGTH
    return shrunk


def main() -> None:
    with Loader() as loader:
        for name in sys.argv[1:] or PUBLISHED:
            try:
                print(f"{name}: {' '.join(measure(name, loader).outcome)}", flush=True)
            except NotBuilt as error:
                print(f"{name}: not built: {error!s:.200}", flush=True)


if __name__ == "__main__":
    main()
