"""RQ's keys and the names of its queues. What a prefix changes of them is told in keys.py."""

from typing import get_args

from scorepool.store.keys import DEFAULT_PREFIX, PREFIX, QUEUE_PREFIX
from scorepool.wire.request_fields import Priority

_JOB = "rq:job:" if PREFIX == DEFAULT_PREFIX else f"rq:job:{PREFIX}:"


class RqKeys:
    """RQ's keys, as RQ 2.12 spells them."""

    queues = "rq:queues"  # set: keys of all queues
    suspended = "rq:suspended"  # exists while `rq suspend` holds
    workers = "rq:workers"  # set: keys of all workers

    @staticmethod
    def queue(queue: str) -> str:
        return f"rq:queue:{queue}"

    @staticmethod
    def registry(name: str, queue: str) -> str:
        """zset: ids of the jobs of a queue in one state.

        `name` is wip, finished, failed, deferred, scheduled, canceled.
        """
        return f"rq:{name}:{queue}"

    @staticmethod
    def job(job_id: str) -> str:
        """hash: see job_fields.py."""
        return f"{_JOB}{job_id}"

    @staticmethod
    def dependents(job_id: str) -> str:
        """set: ids of the jobs that wait for this one."""
        return f"{RqKeys.job(job_id)}:dependents"

    @staticmethod
    def execution(lease_key: str) -> str:
        """hash that expires when the lease is over."""
        return f"rq:execution:{lease_key}"

    @staticmethod
    def executions(job_id: str) -> str:
        return f"rq:executions:{job_id}"

    @staticmethod
    def results(job_id: str) -> str:
        """stream: RQ's own record of the job's results."""
        return f"rq:results:{job_id}"

    @staticmethod
    def worker(name: str) -> str:
        return f"rq:worker:{name}"

    @staticmethod
    def workers_of(queue: str) -> str:
        return f"rq:workers:{queue}"

    @staticmethod
    def commands(worker: str) -> str:
        """Channel: commands for one worker."""
        return f"rq:pubsub:{worker}"


def rq_queue(name: str) -> str:
    """Return the name that RQ gives the queue `name` of this deployment, which may have been given already."""
    return name if name.startswith(QUEUE_PREFIX) else f"{QUEUE_PREFIX}{name}"


def is_own_queue(queue: str) -> bool:
    """True if the queue, by its name in RQ, belongs to this deployment."""
    return queue.startswith(QUEUE_PREFIX) if QUEUE_PREFIX else "::" not in queue


def queue_name(model: str, priority: Priority) -> str:
    """Return RQ's name of the queue of a model and a priority."""
    return rq_queue(model if priority == "normal" else f"{model}:{priority}")


def queue_names(*names: str) -> list[str]:
    """Return the queues of a model, the first to be drained first.

    Jobs for an alias are in the queues of the model's first name, except those that were accepted while no worker was
    live, when the alias could not be resolved.
    """
    return [queue_name(name, priority) for priority in get_args(Priority) for name in names]
