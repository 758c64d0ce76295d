"""Engines of tiny models, and transformers with the same weights. Both are opened once per session."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from scorepool.engine import Engine, EngineSettings
from scorepool.engine.scheduling import proposals, speculator
from scorepool.engine.speculation.acceptance import AcceptanceRate
from scorepool.engine.speculation.cost import StepCost
from survey import reference
from survey.families import FAMILIES
from tests.engine.oracle import Oracle
from tests.tiny_models import TinyModels
from tests.tiny_tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def folder_of(tiny_models: TinyModels, root: Path) -> Callable[[str], Path]:
    """Return the folder of a tiny model, or of the shipped model for "demo"."""
    return lambda name: root / "scorepool" / "models" / "demo" if name == "demo" else tiny_models(name)


@pytest.fixture(scope="session")
def engine_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Return a cached engine for a model and settings, as in `engine_of("llama", max_batch_tokens=64)`.

    It computes in float32 unless the settings say otherwise, on GPUs too.
    """
    engines: list[Engine] = []

    @cache
    def open_engine(name: str, **settings: int | str) -> Engine:
        engines.append(Engine(EngineSettings(model=str(folder_of(name)), **{"dtype": "float32", **settings})))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def edited(tiny_models: TinyModels, tmp_path: Path) -> Callable[..., Path]:
    """Copy a tiny model and change values of its config.json."""

    def edit(name: str, **values: object) -> Path:
        folder = Path(shutil.copytree(tiny_models(name), tmp_path / "model"))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return edit


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    """Open an engine of a folder, with settings, for one test."""
    engines: list[Engine] = []

    def open_(folder: Path, **settings: Any) -> Engine:
        engines.append(Engine(EngineSettings(model=str(folder), **settings)))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture
def unmeasured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let speculation guess what steps cost, so that what it does follows from the tokens and not from the machine."""
    monkeypatch.setattr(StepCost, "record", lambda *_, **__: None)
    monkeypatch.setattr(StepCost, "must_measure", False)


@pytest.fixture
def always_propose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], None]:
    """Return a function that lets each step verify as many tokens as `choose` makes of the most, whatever it costs."""

    def propose(choose: Callable[[int], int]) -> None:
        monkeypatch.setattr(speculator, "choose_width", lambda cost, rows, max_width: choose(max_width))
        monkeypatch.setattr(StepCost, "must_measure", False)
        monkeypatch.setattr(proposals, "AcceptanceRate", partial(AcceptanceRate, max_proposed=sys.maxsize))
        monkeypatch.setattr(AcceptanceRate, "record", lambda *_: None)
        monkeypatch.setattr(AcceptanceRate, "is_guess", False)

    return propose


@pytest.fixture(scope="session")
def oracle_of(folder_of: Callable[[str], Path]) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(folder_of(name)))


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("llama")


@pytest.fixture
def oracle(oracle_of: Callable[[str], Oracle]) -> Oracle:
    return oracle_of("llama")


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Oracle]]:
    """Return the folder of a tiny model of the survey, and transformers' model of it.

    Settings are changed in the section that holds the family's.
    """

    built: dict[str, tuple[Path, Oracle]] = {}

    def build(name: str, base: str, changes: dict[str, object]) -> tuple[Path, Oracle]:
        folder, settings = tmp_path_factory.mktemp(name), FAMILIES[name].bases()[base]
        section = FAMILIES[name].section
        settings |= {section: settings[section] | changes} if section else changes
        model = reference.build_model(reference.build_config(settings), seed=0)
        model.save_pretrained(folder)
        FAMILIES[name].convert(folder)
        build_tokenizer().save_pretrained(folder)
        return folder, Oracle(model)

    def cached(name: str, base: str = "base", **changes: object) -> tuple[Path, Oracle]:
        key = json.dumps([name, base, changes], sort_keys=True)
        if key not in built:
            built[key] = build(name, base, json.loads(json.dumps(changes)))  # tuples become lists
        return built[key]

    return cached
