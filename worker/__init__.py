"""The RQ worker. Importing it loads no mlx, and takes pickle out of RQ in this process: see job.py."""

from worker.batch_worker import BatchWorker
from worker.connection import Redis
from worker.job import Job, Queue
from worker.webhook import WebhookWorker

__all__ = ["BatchWorker", "Job", "Queue", "Redis", "WebhookWorker"]
