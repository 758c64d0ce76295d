"""The examples run, and print what the demo model finds."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from scorepool.local.stack import Stack

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def run(stack: Stack) -> Callable[[str], list[str]]:
    def run(name: str) -> list[str]:
        command = [sys.executable, "-W", "error", str(EXAMPLES / name), stack.url]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    return run


def test_every_example_is_run_here():
    assert sorted(EXAMPLES.glob("*.py")) == [
        EXAMPLES / f"score_{name}.py" for name in ("dataset", "pandas", "polars", "ray")
    ]


def test_datasets_map(run: Callable[[str], list[str]]):
    assert [line.split()[-2:] for line in run("score_dataset.py")[1:]] == [
        ["-11.85", "5"],
        ["-14.56", "5"],
        ["-5.85", "1"],
    ]


def test_pandas(run: Callable[[str], list[str]]):
    words = [row.split() for row in run("score_pandas.py")]
    assert words[0] == ["prompt", "completion", "logprob", "per_token", "rank", "generated"]
    assert [(row[0], row[-3]) for row in words[1:3]] == [("If", "1"), ("If", "2")]
    assert [row[-2:] for row in words[1:3]] == [["it", "is\\n"]] * 2
    assert [row[1] for row in words[3:]] == ["os", "the"]


def test_polars(run: Callable[[str], list[str]]):
    printed = "\n".join(run("score_polars.py"))
    assert "Return the number of items." in printed
    assert "tsrif" not in printed


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs `pip install 'ray[data]'`, which no extra brings")
def test_ray(run: Callable[[str], list[str]]):
    assert [row.split()[1] for row in run("score_ray.py")[1:]] == ["module_3", "module_2", "module_32"]
