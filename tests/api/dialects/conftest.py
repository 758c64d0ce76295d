"""The real stack on the demo model, driven by released clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests import scripted_model

SECRET = "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


@pytest.fixture(scope="session")
def demo_folder(root: Path) -> Path:
    return root / "scorepool" / "models" / "demo"


@pytest.fixture(scope="session")
def stack(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "1",
    }
    state = tmp_path_factory.mktemp("stack")
    with Stack([f"demo,gpt-4o-mini={demo_folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The real stack on a scripted model `m`."""
    folder, state = tmp_path_factory.mktemp("scripted"), tmp_path_factory.mktemp("stack")
    scripted_model.build(folder, scripted_model.SCRIPT)
    with Stack([f"m={folder}"], state=state, environ={"SCOREPOOL_PORT": str(free_port())}, logs=state) as stack:
        yield stack


@pytest.fixture
def sdk(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def native(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client
