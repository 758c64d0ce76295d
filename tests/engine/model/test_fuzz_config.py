"""Whatever a config.json holds, the model is served, or refused with one sentence."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from scorepool.engine import EngineSettings, LoadError
from scorepool.engine.model.load import open_model
from tests.tiny_models import TinyModels

FAMILIES = ("llama", "llama3", "gemma3", "qwen3_moe", "qwen3_next", "gpt_oss", "mamba2")
# Not in their configurations, or not in all of them.
KEYS = ("head_dim", "quantization", "quantization_config", "rope_scaling", "sliding_window", "text_config", "auto_map")
VALUES = (
    *(None, True, "two", "", -1, 0, 3, 10**12, 1.5, -0.5, math.nan, math.inf),
    *([], [1], {}, {"a": None}, [[None]], {"rope_type": "yarn"}),
)
NUM_CASES = 40


def mutate(config: dict[str, Any], draw: random.Random) -> str:
    """Change one setting, in a section or not, and return what was changed."""
    sections = [config, *(value for value in config.values() if isinstance(value, dict) and value)]
    section = draw.choice(sections)
    key = draw.choice([*section, *(KEYS if section is config else ())])
    section[key] = draw.choice(VALUES)
    return f"{key} = {section[key]!r}"


def check(tiny_models: TinyModels, tmp_path: Path, family: str, seed: int, num_cases: int) -> None:
    folder = Path(shutil.copytree(tiny_models(family), tmp_path / "model"))
    original = (folder / "config.json").read_text()
    draw = random.Random(f"{family} {seed}")
    for _ in range(num_cases):
        config = json.loads(original)
        change = mutate(config, draw)
        (folder / "config.json").write_text(json.dumps(config))
        outcome = ""
        try:
            open_model(EngineSettings(model=str(folder)))
        except Exception as error:
            outcome = error.message if isinstance(error, LoadError) else f"{error!r}\n"
        assert "\n" not in outcome, change


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of transformers, about the values
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutated_configuration_is_served_or_refused(tiny_models: TinyModels, tmp_path: Path, family: str):
    check(tiny_models, tmp_path, family, seed=0, num_cases=NUM_CASES)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_mutated_configurations(tiny_models: TinyModels, tmp_path: Path, family: str, seed: int):
    check(tiny_models, tmp_path, family, seed, num_cases=20 * NUM_CASES)
