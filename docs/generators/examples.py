"""Write docs/examples.md from the programs in examples/: `make docs`. A test compares them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/examples.md"
INTRODUCTION = """# Examples

Small programs to begin from, in `examples/`. Each takes the API's URL as an argument, or else from `SCOREPOOL_URL`, and
runs beside `make serve`: they expect its demo model. The tests run them; `make docs` writes this page.
"""


def render() -> str:
    """Return the page."""
    programs = sorted((ROOT / "examples").glob("*.py"))
    return "\n".join([INTRODUCTION, *(line for program in programs for line in _section(program))])


def _section(program: Path) -> Iterator[str]:
    """Yield a program's name, what its docstring says before the command line, and its code after the docstring."""
    source = program.read_text()
    module = ast.parse(source)
    docstring = ast.get_docstring(module)
    if docstring is None:
        raise ValueError(f"{program} has no docstring")
    yield f"## {program.name}\n\n{docstring.partition(f'{chr(10)}{chr(10)}python ')[0]}\n"
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip("\n")
    yield f"```python\n{code}\n```\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
