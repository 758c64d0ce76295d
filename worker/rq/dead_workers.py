"""Workers of this machine that are gone: their jobs need not wait for the end of their leases."""

import os
import socket
from collections.abc import Sequence
from uuid import getnode

from redis import Redis
from rq.queue import Queue
from rq.utils import as_text


def machine_id() -> str:
    """Names this machine, also among ones with the same hostname; empty where that cannot be told.

    `getnode` is a hardware address; where it finds none it invents one, with the multicast bit set.
    """
    node = getnode()
    return "" if node >> 40 & 1 else f"{socket.gethostname()}/{node:012x}"


def orphaned_leases(connection: Redis, queues: Sequence[Queue]) -> list[str]:
    """`<job>:<execution>` of leases whose worker ran on this machine and runs no more.

    For a worker that has claimed nothing yet: a lease under its own name is one of its predecessor.
    """
    found = [lease_key for queue in queues for lease_key in connection.zrange(queue.started_job_registry.key, 0, -1)]
    lease_keys = [lease_key.decode() for lease_key in found if lease_key.isascii()]  # type: ignore[union-attr] # others are none
    with connection.pipeline(transaction=False) as pipeline:
        for lease_key in lease_keys:
            pipeline.hget(f"rq:execution:{lease_key}", "worker_name")
        owners = [as_text(owner) if owner else None for owner in pipeline.execute()]
    dead = {owner for owner in set(owners) if owner is not None and is_dead(connection, owner)}
    return [lease_key for lease_key, owner in zip(lease_keys, owners, strict=True) if owner in dead]


def is_dead(connection: Redis, name: str) -> bool:
    """Whether the worker of that name ran on this machine, in a process that is gone."""
    host, pid = connection.hmget(f"rq:worker:{name}", "machine", "pid")
    if not host or not pid or not pid.isdigit() or host != machine_id().encode():
        return False
    if int(pid) == os.getpid():  # ours now: the only process of a container has the same number each time
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
