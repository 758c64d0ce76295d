"""Fixtures of the API's and of the worker's tests, because these tests use both."""

from tests.api.conftest import anyio_backend, serving, worker
from tests.worker.conftest import workers

__all__ = ["anyio_backend", "serving", "worker", "workers"]
