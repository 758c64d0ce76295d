"""The names, files and defaults that the documents state are right."""

import ast
import json
import re
import runpy
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest
import yaml
from pymdownx.slugs import slugify

from scorepool import store
from scorepool.wire.comparison import ROUNDING_NATS
from survey import document as survey_document

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))),
)
COMMANDS = (ROOT / "docs/commands.md").read_text()


def test_every_setting_is_documented_with_its_default(root: Path):
    rows = re.findall(
        r"^\| `SCOREPOOL_(\w+)` \| (?:`(.*?)`)? ?\|", (root / "docs/settings.md").read_text(), re.MULTILINE
    )
    defaults = msgspec.to_builtins(store.Settings())
    expected = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in defaults.items()}
    assert {name.lower(): default for name, default in rows} == expected


def test_the_tolerances_of_the_modes_are_documented(root: Path):
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", (root / "docs/numbers.md").read_text(), re.MULTILINE)
    assert {dtype: float(nats) for dtype, nats in rows} == ROUNDING_NATS


def test_the_tables_of_the_survey_follow_from_its_files():
    text = survey_document.DOCUMENT.read_text()
    assert survey_document.render(text) == text, "run `python -m survey.document`"


def test_the_page_of_commands_follows_from_the_parser(root: Path):
    text = runpy.run_path(str(root / "docs/generators/commands.py"))["render"]()
    assert (root / "docs/commands.md").read_text() == text, "run `make docs`"
    sections = text.split("\n## ")[1:]
    assert len(sections) > 15
    assert [section.partition("\n")[0] for section in sections if "\nExit status " not in section] == []
    recorded = {path.stem for path in (root / "docs/recordings").iterdir()}
    assert recorded <= {section.partition("`\n")[0].removeprefix("`scorepool ") for section in sections}


def test_the_reference_of_the_sdk_is_that_of_its_sources(root: Path):
    text = (root / "docs/sdk.md").read_text()
    assert runpy.run_path(str(root / "docs/generators/sdk.py"))["render"](text) == text, "run `make docs`"


def test_the_reference_of_routes_and_jobs_is_that_of_the_openapi_document(root: Path):
    pages = runpy.run_path(str(root / "docs/generators/reference.py"))["render"]()
    assert sorted(path.name for path in pages) == ["jobs.md", "routes.md"]
    for path, text in pages.items():
        assert path.read_text() == text, "run `make docs`"


def test_the_page_of_examples_is_that_of_the_programs(root: Path):
    text = runpy.run_path(str(root / "docs/generators/examples.py"))["render"]()
    assert (root / "docs/examples.md").read_text() == text, "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_in_a_document_exists(document: str, root: Path):
    text = (root / document).read_text()
    named = set(re.findall(r"`((?:api|bench|engine|scorepool|store|tests|wire|worker|deploy|docs)/[\w./-]+)`", text))
    linked = {str(Path(document).parent / link) for link in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
    assert [name for name in named | linked if not (root / name).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_document_holds_a_path_of_the_machine_it_was_written_on(name: str, root: Path):
    assert str(root.parent) + "/" not in (root / name).read_text()


def fences(text: str, *languages: str) -> list[str]:
    """Return the blocks of code in some languages."""
    found = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for language, code in found if language in languages]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_of_code_can_be_parsed(name: str, root: Path):
    text = (root / name).read_text()
    for code in fences(text, "python"):
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for code in fences(text, "json"):
        json.loads(code) if code.count("\n{") == 0 else [json.loads(line) for line in code.splitlines()]
    for code in fences(text, "yaml"):
        yaml.safe_load(code)
    commands = "\n".join(fences(text, "sh"))
    assert subprocess.run(["bash", "-n"], input=commands, stderr=subprocess.PIPE, text=True, check=False).stderr == ""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_that_is_shown_has_the_options_that_are_shown(name: str, root: Path):
    sections = dict(re.findall(r"^## `scorepool ([\w-]+)`\n(.*?)(?=^## |\Z)", COMMANDS, re.MULTILINE | re.DOTALL))
    code = "\n".join(fences((root / name).read_text(), "sh", "console")).replace("\\\n", " ")
    for command, rest in re.findall(r"^[^#\n]*?\bscorepool ([a-z][\w-]*)(.*)", code, re.MULTILINE):
        options = re.findall(r"(?<!\S)--?[a-z][\w-]*", re.sub(r"[|;#>].*", "", rest))
        assert command in sections, f"scorepool {command}"
        assert [each for each in options if not re.search(rf"{each}\b", sections[command])] == [], command


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_every_anchor_in_a_document_outside_the_site_is_a_heading(name: str, root: Path):
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", (root / name).read_text()):
        headings = re.findall(r"^#+ (.*)$", (root / (path or name)).read_text(), re.MULTILINE)
        assert anchor in [slugify(case="lower")(heading, "-") for heading in headings], f"{path}#{anchor}"
