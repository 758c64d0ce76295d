"""Read the messages that our scripts publish to one worker: see store/lua/wake.lua.

    (empty)                                                          there may be jobs
    taken, key of the lease                                          another worker has the job
    leased, queue, id, execution, time of the lease, request, hash   the worker has one more job (hand_out.lua)

A message is a list of strings of any bytes, each with its length before it: `5:taken3:a:b`.
"""

import re
from collections.abc import Sequence

from rq.queue import Queue

from scorepool.store import JobField
from scorepool.worker.claims.leases import ClaimedJob

JOB_ID = re.compile(rb"[\w-]+")  # the ids that RQ accepts
MAX_UNIX_S = 2**37  # beyond the year 6000; `datetime` ends at 9999


def read_message(data: bytes) -> list[bytes]:
    """Return the strings of a message. Raises ValueError."""
    strings = []
    at = 0
    while at < len(data):
        colon = data.index(b":", at)
        end = colon + 1 + int(data[at:colon])
        if not colon < end <= len(data):
            raise ValueError("a message ends within a string")
        strings.append(data[colon + 1 : end])
        at = end
    return strings


def read_leased(strings: Sequence[bytes], queues: Sequence[Queue]) -> ClaimedJob:
    """Return the job of a message. Raises ValueError.

    Any client of Redis can publish one, so what a claim's reply cannot lack is checked.
    """
    name, job_id, execution_id, leased_at, request, *flat = strings
    queue = next((queue for queue in queues if queue.name.encode() == name), None)
    if queue is None:
        raise ValueError("a message about a queue that this worker does not serve")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    if not JOB_ID.fullmatch(job_id):
        raise ValueError("a message about a job whose id is none")
    if JobField.DATA.encode() not in fields:
        raise ValueError("a message about a job without data")
    leased_at_s = float(leased_at)
    if not 0 <= leased_at_s <= MAX_UNIX_S:
        raise ValueError("a message about a lease at an impossible time")
    return ClaimedJob(queue, job_id.decode(), execution_id.decode(), fields, request or None, leased_at_s)
