"""The examples and the guides run, and print what the demo model finds."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scorepool.local.stack import Stack

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
GUIDES = ("index", "researchers", "trainers", "evaluators")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


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


@pytest.mark.parametrize("name", GUIDES)
def test_guide(name: str, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The Python of a guide runs, and prints the text that follows it; its commands print what it shows."""
    monkeypatch.setenv("SCOREPOOL_URL", stack.url)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {}
    blocks = [(match[1], match[2]) for match in FENCE.finditer((ROOT / f"docs/{name}.md").read_text())]
    for (language, text), (next_language, next_text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python":
            printed = run_python(text.replace("http://127.0.0.1:8000", stack.url), names)
            if next_language == "text":
                check(printed, next_text)
        elif language == "console":
            check(run_commands(text, tmp_path), text)


def run_python(code: str, names: dict[str, Any]) -> str:
    """Run the code of a guide with the names of its earlier code. Return what it prints."""
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "guide", "exec"), names)
    return output.getvalue()


def run_commands(text: str, folder: Path) -> str:
    """Run the commands of a block. Return the block with what they print. `cat` of a new file writes the file."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = ""
    for entry in text.removeprefix("$ ").split("\n$ "):
        command, _, output = entry.rstrip("\n").partition("\n")
        new = folder / command.removeprefix("cat ")
        if command.startswith("cat ") and not new.exists():
            new.write_text(f"{output}\n")
        run = subprocess.run(
            command.removeprefix(".venv/bin/"),
            shell=True,
            cwd=folder,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        shown += f"$ {command}\n{run.stdout}"
    return shown


def check(found: str, shown: str) -> None:
    """Compare two texts, but numbers only nearly, because another processor rounds them differently."""
    found, shown = ("\n".join(line.rstrip() for line in text.rstrip().split("\n")) for text in (found, shown))
    assert NUMBER.split(found) == NUMBER.split(shown)
    assert [*map(float, NUMBER.findall(found))] == pytest.approx([*map(float, NUMBER.findall(shown))], abs=0.02)
