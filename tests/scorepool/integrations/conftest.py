"""The real stack on two models with different tokenizers: `demo` has no BOS, `llama` begins every text with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.tiny_models import TinyModels


@pytest.fixture(scope="session")
def folders(root: Path, tiny_models: TinyModels) -> dict[str, Path]:
    return {"demo": root / "scorepool" / "models" / "demo", "llama": tiny_models("llama")}


@pytest.fixture(scope="session")
def stack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    models = [f"{name}={folder}" for name, folder in folders.items()]
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_DTYPE": "float32",
        "SCOREPOOL_REDIS_APPENDFSYNC": "everysec",
        "SCOREPOOL_WEBHOOK_SECRET": "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "1",
    }
    with Stack(models, state=state, environ=environ, logs=state / "logs") as stack:
        yield stack
