"""Provide an API that serves two models of different tokenizers to the tests of this folder."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


@pytest.fixture(scope="package")
def two_models_url(root: Path, tiny_models: "TinyModels", tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve `demo`, whose texts begin without BOS, and `tiny`, whose texts begin with it; yield the API's URL."""
    state = tmp_path_factory.mktemp("s")
    models = [f"demo={root}/scorepool/models/demo", f"tiny={tiny_models('llama')}"]
    environ = {"SCOREPOOL_PORT": str(free_port())}
    with Stack(models, state=state, environ=environ, logs=state / "logs") as stack:
        yield stack.url


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """Restore what SIGTERM and SIGHUP do, which commands change."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)
