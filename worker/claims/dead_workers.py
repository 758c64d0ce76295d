"""Find workers of this machine whose process is gone: their jobs need not wait for the end of their leases."""

import os
import socket
from collections.abc import Sequence
from uuid import getnode

from redis import Redis
from rq.queue import Queue
from rq.utils import as_text, utcparse

from scorepool.store import JobField, RqKeys
from scorepool.worker.redis_link.wrong_types import execute_reads, has_type


def machine_id() -> str:
    """Return a name of this machine that differs from those of others with its hostname; empty if it has none.

    `getnode` returns a hardware address. If it finds none, it makes one up and sets the multicast bit.
    """
    node = getnode()
    return "" if node >> 40 & 1 else f"{socket.gethostname()}/{node:012x}"


def pid_namespace() -> str:
    """Return the number of what has our process ids, which containers may not share; empty where there is none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def leases_of_dead(
    connection: Redis, queues: Sequence[Queue], name: str, lease_s: float, *, is_starting: bool
) -> list[list[str]]:
    """Return the keys of the leases of each worker that ran on this machine, in a process that is gone.

    `name` is that of the calling worker. Before its first claim (`is_starting`), leases under it are those of its
    predecessor. `lease_s`: see `is_dead`.
    """
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.smembers(RqKeys.workers_of(queue.name))
        found = {as_text(key) for keys in execute_reads(pipeline) for key in keys or ()}
    workers = {key.removeprefix(RqKeys.worker("")) for key in found}
    dead = [
        worker for worker in sorted(workers) if (worker != name or is_starting) and is_dead(connection, worker, lease_s)
    ]
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


def is_dead(connection: Redis, name: str, lease_s: float) -> bool:
    """True if the worker of that name ran on this machine, in a process that is gone.

    Of containers with one hostname and address, and of one that was restarted, process ids say nothing: a worker in
    another PID namespace is dead if it has sent no heartbeat for half a lease, `lease_s`.
    """
    if not has_type(connection, RqKeys.worker(name), "hash"):
        return False
    fields = connection.hmget(RqKeys.worker(name), "machine", "pid", "pid_namespace", "last_heartbeat")
    host, pid, namespace, heartbeat = fields
    if not host or not pid or not pid.isdigit() or host != machine_id().encode():
        return False
    if namespace and namespace != pid_namespace().encode():  # none: a worker of an older release
        return _age_s(connection, heartbeat) > lease_s / 2
    if int(pid) == os.getpid():  # our own pid: the only process of a container gets the same pid at each start
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _age_s(connection: Redis, heartbeat: bytes | str | None) -> float:
    """Return how long ago a heartbeat was sent, by Redis's clock; 0 if nobody can tell."""
    seconds, microseconds = connection.time()
    try:
        return seconds + microseconds / 1e6 - utcparse(as_text(heartbeat or b"")).timestamp()
    except ValueError:
        return 0.0
