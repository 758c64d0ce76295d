"""The real stack on the demo model, driven by the requests that trainers send."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.api.conftest import KEYS

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


MAX_WEIGHTS_BYTES = 2**24


@pytest.fixture(scope="session")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("trainers")
    model = f"demo={root / 'scorepool' / 'models' / 'demo'}"
    with Stack([model], state=state, environ={"SCOREPOOL_PORT": str(free_port())}, logs=state / "logs") as stack:
        yield stack


@pytest.fixture(scope="package")
def policy(tiny_models: "TinyModels", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve `policy`, a tiny llama, to the tenants alice and bob. Bob is the operator. The result cache is small."""
    folder, base = tmp_path_factory.mktemp("policy"), tiny_models("llama")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_API_KEYS": KEYS,
        "SCOREPOOL_OPERATOR_KEYS": "bob",
        "SCOREPOOL_LEASE_S": "4",
        "SCOREPOOL_RESULT_CACHE_BYTES": "60000",
        "SCOREPOOL_MAX_WEIGHTS_BYTES": str(MAX_WEIGHTS_BYTES),
        "SCOREPOOL_REDIS_APPENDFSYNC": "everysec",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with Stack([f"policy={base}"], state=folder / "s", environ=environ, logs=folder / "logs") as stack:
        yield stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


@pytest.fixture
def native(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client
