"""The RQ worker. Importing it loads no mlx, and takes pickle out of RQ in this process: see job.py."""

from worker.job import Job, Queue
from worker.webhook import WebhookWorker
from worker.worker import BatchWorker

__all__ = ["BatchWorker", "Job", "Queue", "WebhookWorker"]
