"""The wheel, installed into a fresh environment outside the checkout and used beside folders with our rooms' names."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import scorepool
from scorepool.commands.running import NEEDS

ROOMS = ("api", "engine", "store", "wire", "worker")
pytestmark = pytest.mark.timeout(240)

USER_SCRIPT = """
from scorepool import Client, Failure, Generate, JobFailed, Message, Result, Score, ScoreItem, ScorepoolError, Tool

request = Score(model="demo", items=[ScoreItem(prompt="a", completion=" b")], top_logprobs=2)
chat = Generate(model="demo", messages=[Message(role="user", content="hi")], tools=[Tool(name="look")])


def best(client: Client) -> float | None:
    result: Result = client.score("demo", [("a", " b"), ("a", " c")], rank=True, priority="low")
    answer: Result = client.generate("demo", "a", max_tokens=8, stop=["."])
    try:
        client.result(client.submit(request), timeout_s=30)
    except JobFailed as error:
        failure: Failure = error.failure
        print(failure.code, answer.sequences[0].text)
    except ScorepoolError as error:
        print(error.status, error.code)
    return result.sequences[0].logprob_sum
"""


SUFFIXES = (".py", ".lua", ".json", ".html", ".js", ".css", ".svg")


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and a wheel from the sdist, from the files that the image is built from, and the tests."""
    source = tmp_path_factory.mktemp("source")
    for name in ["tests", *copied_into_the_image(root)]:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(root / name, source / name, symlinks=True, ignore=ignored)
        else:
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy(root / name, source / name)
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = dist.glob("*.whl")
    return path


def copied_into_the_image(root: Path) -> list[str]:
    """Return the files and folders that .dockerignore lets into the build context."""
    return [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def base_distributions(root: Path) -> set[str]:
    """Return every distribution that `pip install scorepool` brings."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pending, found = [Requirement(line) for line in project["dependencies"]], set[str]()
    while pending:
        name = canonicalize_name(pending.pop().name)
        if name not in found:
            found.add(name)
            children = map(Requirement, importlib.metadata.requires(name) or [])
            pending += [child for child in children if child.marker is None or child.marker.evaluate({"extra": ""})]
    return found


def make_environment(folder: Path, wheel: Path, libraries: Path) -> Path:
    """Create a virtual environment with the wheel, whose dependencies are read from `libraries`; return its bin."""
    venv.create(folder, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", "--disable-pip-version-check", wheel], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return folder / "bin"


@pytest.fixture(scope="session")
def plain(root: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with its base dependencies only."""
    libraries = tmp_path_factory.mktemp("libraries")
    for name in base_distributions(root):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {".."}:
            (libraries / top).symlink_to(Path(str(distribution.locate_file(top))))
    return make_environment(tmp_path_factory.mktemp("plain"), wheel, libraries)


@pytest.fixture(scope="session")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with every dependency of this environment."""
    libraries = Path(str(importlib.metadata.distribution("msgspec").locate_file("")))
    binaries = make_environment(tmp_path_factory.mktemp("full"), wheel, libraries)
    rq = binaries / "rq"
    rq.write_text(f"#!{binaries / 'python'}\nfrom rq.cli import main\nmain()\n")
    rq.chmod(0o755)
    return binaries


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder with packages named as our rooms, whose import fails."""
    for name in (*ROOMS, "client", "models", "tests"):
        package = tmp_path / "elsewhere" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported from the current folder')\n")
    return tmp_path / "elsewhere"


def run(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this environment's settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SCOREPOOL_"))}
    return subprocess.run(command, cwd=cwd, env=inherited | environ, capture_output=True, text=True, check=False)


def test_the_wheel_adds_one_package_with_real_files(root: Path, wheel: Path):
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {"scorepool"}
    assert len(licenses) == 1
    for room in ROOMS:
        files = [path for path in (root / room).rglob("*") if path.suffix in SUFFIXES]
        assert {f"scorepool/{path.relative_to(root)}" for path in files} - names == set()
    data = ("py.typed", "cli.py", "local/stack.py", "models/demo/model.safetensors", "models/demo/tokenizer.json")
    assert {f"scorepool/{name}" for name in data} - names == set()
    assert not [name for name in names if "tests" in name.split("/")]


def test_the_version_stands_in_one_place(root: Path, plain: Path, elsewhere: Path):
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert run(plain / "scorepool", "--version", cwd=elsewhere).stdout == f"{version}\n"
    first = re.search(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == version


def test_a_plain_installation_imports_every_public_name(plain: Path, elsewhere: Path):
    code = f"from scorepool import {', '.join(scorepool.__all__)}; Client('http://127.0.0.1:1/v1').close()"
    done = run(plain / "python", "-P", "-c", code, cwd=elsewhere)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak
def test_a_plain_installation_verifies_results_on_a_server(plain: Path, elsewhere: Path):
    done = run(plain / "scorepool", "verify", "--url", "http://127.0.0.1:1", "a-job", cwd=elsewhere)
    assert done.returncode == 2
    assert done.stdout.startswith("a-job: cannot tell: the API does not answer: ")
    assert done.stderr == ""


def test_a_plain_installation_shows_help_and_makes_keys(plain: Path, elsewhere: Path):
    shown = run(plain / "scorepool", "--help", cwd=elsewhere)
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("demo", "serve", "api", "worker", "redis", "verify", "key"))
    made = run(plain / "scorepool", "key", "ann", cwd=elsewhere)
    assert made.returncode == 0
    assert made.stdout.splitlines()[1].startswith("entry: ann:")


# Arguments of what NEEDS names, and its exit status, where they are not those of a subcommand without arguments.
ARGUMENTS = {
    "--local": (["score", "--local", "x", "in.csv", "-o", "out.csv"], 2),
    "--plot": (["score", "--plot", "x.png", "in.csv", "-o", "out.csv"], 2),
    "plot": (["plot", "in.csv"], 2),
    "verify --model": (["verify", "--model", "demo=x", "job"], 2),
    "certify": (["certify", "x"], 1),
    "check-model": (["check-model", "x"], 1),
    "webhook-secret": (["webhook-secret", "x"], 1),
}


@pytest.mark.parametrize("command", NEEDS)
def test_a_command_whose_packages_are_missing_names_the_extra(plain: Path, elsewhere: Path, command: str):
    arguments, status = ARGUMENTS.get(command, (command.split(), 1))
    done = run(plain / "scorepool", *arguments, cwd=elsewhere)
    assert (done.returncode, done.stdout) == (status, "")
    [line] = done.stderr.splitlines()
    shown = f"score {command}" if command.startswith("--") else command
    assert line.startswith(f"scorepool: `scorepool {shown}` needs packages that are not installed (")
    assert line.endswith(f"): run `{plain / 'python'} -m pip install 'scorepool[{NEEDS[command][0]}]'`")


def test_the_needs_of_each_command_are_what_its_extra_brings(root: Path):
    owners = importlib.metadata.packages_distributions()
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in NEEDS.values():
        pending, listed = [Requirement(line) for line in extras[extra]], set[str]()
        while pending:
            requirement = pending.pop()
            if requirement.name == "scorepool":
                pending += [Requirement(line) for name in requirement.extras for line in extras[name]]
            else:
                listed.add(canonicalize_name(requirement.name))
        brought = {canonicalize_name(owner) for module in modules for owner in owners[module]}
        assert brought & listed == listed


def check_types(plain: Path, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run `mypy --strict` on a user's script against the installed wheel."""
    (folder / "script.py").write_text(script)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache"]
    return run(*mypy, "--python-executable", plain / "python", "script.py", cwd=folder)


@pytest.mark.soak
def test_a_users_script_is_type_checked(plain: Path, tmp_path: Path):
    done = check_types(plain, tmp_path, USER_SCRIPT)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
def test_a_mistake_in_a_users_script_is_a_type_error(plain: Path, tmp_path: Path):
    mistakes = [
        'client.score("demo", [("a", "b")], top_logprob=2)',
        'client.generate("demo", "a", max_token=8)',
        'client.generate("demo", "a", temperature="hot")',
        'client.score("demo", [("a", [1])])',
        'client.score("demo", []).sequences[0].logprob',
        "scorepool.Clinet",
    ]
    script = "import scorepool\n\nclient = scorepool.Client()\n" + "\n".join(mistakes) + "\n"
    done = check_types(plain, tmp_path, script)
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == set(range(4, 4 + len(mistakes))), done.stdout


def test_the_installed_demo_runs_beside_folders_with_our_rooms_names(
    full: Path, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
):
    state = tmp_path_factory.mktemp("s")  # the path of a unix socket must be short
    done = run(full / "scorepool", "demo", cwd=elsewhere, SCOREPOOL_STATE_DIR=str(state))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "signature verified" in done.stdout
    assert "Everything is stopped." in done.stdout


def test_every_room_is_imported_from_the_installed_package(full: Path, elsewhere: Path):
    imports = "import scorepool.api.app, scorepool.engine.engine, scorepool.worker.inference.batch_worker as worker"
    code = f"{imports}; print(worker.__file__)"
    done = run(full / "python", "-P", "-c", code, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(full.parent)
