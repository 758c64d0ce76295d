"""What type checkers say of code that uses the SDK."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = """
from scorepool import AsyncClient, Client

client = Client()
client.score("demo", [("a", "b")], ranks=True)
client.score("demo", [("a", "b")], rank="yes")
client.score("demo", [("a", [1])])
client.generate("demo", "a", tool_choice="maybe")
client.jobs(status="done")
text: str = client.score("demo", [("a", "b")]).sequences[0].logprob_sum
client.result("id").numpy()


async def main() -> None:
    async with AsyncClient() as client:
        for delta in client.events("id"):
            print(delta)
"""


def mypy(code: str, folder: Path, root: Path) -> list[str]:
    """Return the errors of `mypy --strict`."""
    path = folder / "user_code.py"
    path.write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return [line.partition(": ")[2] for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.soak
def test_the_guide_and_mistakes_are_told_apart(root: Path, tmp_path: Path):
    guide = "\n".join(re.findall(r"```python\n(.*?)```", (root / "docs/sdk.md").read_text(), re.DOTALL))
    assert mypy(guide, tmp_path, root) == []
    errors = mypy(MISTAKES, tmp_path, root)
    for error, words in zip(
        errors,
        (
            'Unexpected keyword argument "ranks" for "score" of "Client"; did you mean "rank"?',
            'Argument "rank" to "score" of "Client" has incompatible type "str"; expected "bool"',
            "List item 0 has incompatible type",
            'Argument "tool_choice" to "generate" of "Client" has incompatible type',
            'Argument "status" to "jobs" of "Client" has incompatible type',
            "Incompatible types in assignment",
            '"Result" has no attribute "numpy"',
            '"AsyncGenerator[TokenDelta, None]" has no attribute "__iter__"',
        ),
        strict=True,
    ):
        assert words in error
