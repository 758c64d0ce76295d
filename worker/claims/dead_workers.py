"""Find workers of this machine whose process is gone: their jobs need not wait for the end of their leases."""

import os
import socket
from collections.abc import Sequence
from uuid import getnode

from redis import Redis
from rq.queue import Queue
from rq.utils import as_text

from scorepool.store import JobField, RqKeys
from scorepool.worker.redis_link.wrong_types import execute_reads, has_type


def machine_id() -> str:
    """Return a name of what has our process ids: of this machine, or of this container; empty if it has none.

    `getnode` returns a hardware address. If it finds none, it makes one up and sets the multicast bit.
    Containers that share both name and address differ in their PID namespaces. One that is restarted may get another
    name: then its former jobs wait for the end of their leases.
    """
    node = getnode()
    return "" if node >> 40 & 1 else "/".join([socket.gethostname(), f"{node:012x}", *_pid_namespace()])


def _pid_namespace() -> list[str]:
    """Return the number of our PID namespace; none where the system has no such namespaces."""
    try:
        return [str(os.stat("/proc/self/ns/pid").st_ino)]
    except OSError:
        return []


def leases_of_dead(connection: Redis, queues: Sequence[Queue], name: str, *, is_starting: bool) -> list[list[str]]:
    """Return the keys of the leases of each worker that ran on this machine, in a process that is gone.

    `name` is that of the calling worker. Before its first claim (`is_starting`), leases under it are those of its
    predecessor.
    """
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.smembers(RqKeys.workers_of(queue.name))
        found = {as_text(key) for keys in execute_reads(pipeline) for key in keys or ()}
    workers = {key.removeprefix(RqKeys.worker("")) for key in found}
    dead = [worker for worker in sorted(workers) if (worker != name or is_starting) and is_dead(connection, worker)]
    if not dead:
        return []
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.zrange(queue.started_job_registry.key, 0, -1)
        keys = [lease_key for lease_keys in execute_reads(pipeline) for lease_key in lease_keys or ()]
    lease_keys = [lease_key.decode() for lease_key in keys if lease_key.isascii()]  # keys of leases are ASCII
    with connection.pipeline(transaction=False) as pipeline:
        for lease_key in lease_keys:
            pipeline.hget(RqKeys.execution(lease_key), "worker_name")
            # A lease that has expired since is still that of its worker, until somebody reclaims the job.
            pipeline.hget(RqKeys.job(lease_key.rpartition(":")[0]), JobField.WORKER_NAME)
        replies = iter(execute_reads(pipeline))
    owners = [as_text(owner or last_owner or "") for owner, last_owner in zip(replies, replies, strict=True)]
    held = [[key for key, owner in zip(lease_keys, owners, strict=True) if owner == worker] for worker in dead]
    return [lease_keys for lease_keys in held if lease_keys]


def is_dead(connection: Redis, name: str) -> bool:
    """True if the worker of that name ran on this machine, in a process that is gone."""
    if not has_type(connection, RqKeys.worker(name), "hash"):
        return False
    host, pid = connection.hmget(RqKeys.worker(name), "machine", "pid")
    if not host or not pid or not pid.isdigit() or host != machine_id().encode():
        return False
    if int(pid) == os.getpid():  # our own pid: the only process of a container often gets the same one at each start
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
