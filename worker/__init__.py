"""The classes that RQ's command line is given: two workers, and a Job, a Queue and a Redis client for all its commands.

    rq worker -w scorepool.worker.BatchWorker --connection-class scorepool.worker.Redis demo

Each name is imported on first use, so that the webhook worker loads no engine module. Nothing here loads MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scorepool.worker.inference.batch_worker import BatchWorker
    from scorepool.worker.rq.connection import Redis
    from scorepool.worker.rq.job import Job, Queue
    from scorepool.worker.webhooks.webhook_worker import WebhookWorker

__all__ = ["BatchWorker", "Job", "Queue", "Redis", "WebhookWorker"]

_MODULES = {
    "BatchWorker": "scorepool.worker.inference.batch_worker",
    "Job": "scorepool.worker.rq.job",
    "Queue": "scorepool.worker.rq.job",
    "Redis": "scorepool.worker.rq.connection",
    "WebhookWorker": "scorepool.worker.webhooks.webhook_worker",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
