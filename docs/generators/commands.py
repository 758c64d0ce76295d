"""Write docs/commands.md from the parser of the `scorepool` command: `make docs`. A test compares them.

The section of a command ends with its output, if recordings/COMMAND.txt holds it.
"""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "commands.md"
RECORDINGS = Path(__file__).parents[1] / "recordings"
COMMAND = ("utils", "docs", "--name", "scorepool", "--title", "Commands")
INTRODUCTION = """
`scorepool COMMAND --help` shows the same: `make docs` writes this page from the parser. Commands that talk to an API
take its URL from `--url` or `SCOREPOOL_URL`, and the key from `--api-key` or `SCOREPOOL_API_KEY`; the other variables
are in [settings.md](settings.md). `scorepool --install-completion` completes commands and options in bash, zsh and
fish.
"""


def render() -> str:
    """Return the page."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SCOREPOOL_")}
    typer = [Path(sys.executable).with_name("typer"), "scorepool.cli", *COMMAND]
    text = subprocess.run(typer, env=environ, capture_output=True, text=True, check=True).stdout
    text = unescape(text).replace("\n\n\n", "\n\n").rstrip() + "\n"
    text = re.sub(
        r"^\* `([a-z][a-z-]*)`: .*", r"* [`\1`](#scorepool-\1)", text, flags=re.MULTILINE
    )  # typer cuts them off
    text = re.sub(r"^\* `--help`: .*\n", "", text, flags=re.MULTILINE).replace("**Options**:\n\n\n", "")
    title, _, rest = text.partition("\n")
    sections = f"{title}\n{INTRODUCTION}{rest}".rstrip().split("\n\n## ")
    return "\n\n## ".join(map(add_recording, sections)) + "\n"


def add_recording(section: str) -> str:
    """Return the section with the output of its command, which the first line names in code."""
    recording = RECORDINGS / f"{section.partition(chr(10))[0].strip('`').removeprefix('scorepool ')}.txt"
    return f"{section}\n\n```console\n{recording.read_text()}```" if recording.exists() else section


if __name__ == "__main__":
    DOCUMENT.write_text(render())
