"""Run the code and the commands that a guide shows, and compare what they print with what it shows."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def run_guide(guide: str, url: str, folder: Path) -> None:
    """Check a guide. Python prints the block of text that follows it; a console has commands with their output."""
    names: dict[str, Any] = {}
    blocks = [(match[1], match[2]) for match in FENCE.finditer(guide)]
    for (language, text), (next_language, next_text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python":
            printed = run_python(text.replace("http://127.0.0.1:8000", url), names)
            if next_language == "text":
                check(printed, next_text)
        elif language == "console":
            check(run_commands(text, folder), text)


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
