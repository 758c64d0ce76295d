"""The fixtures of both sides: these tests cross rooms."""

from tests.api.conftest import anyio_backend, serving, worker
from tests.worker.conftest import workers

__all__ = ["anyio_backend", "serving", "worker", "workers"]
