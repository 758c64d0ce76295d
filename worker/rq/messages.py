"""Read the messages that our scripts publish to one worker: see store/lua/wake.lua.

    (empty)                                                          there may be jobs
    taken, key of the lease                                          another worker has the job
    leased, queue, id, execution, time of the lease, request, hash   the worker has one more job (hand_out.lua)

A message is a list of strings of any bytes, each with its length before it: `5:taken3:a:b`.
"""

from collections.abc import Sequence

from rq.queue import Queue

from scorepool.worker.rq.leases import ClaimedJob


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
    """Return the job of a message. Raises ValueError."""
    name, job_id, execution_id, leased_at, request, *flat = strings
    queue = next((queue for queue in queues if queue.name.encode() == name), None)
    if queue is None:
        raise ValueError("a message about a queue that this worker does not serve")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return ClaimedJob(queue, job_id.decode(), execution_id.decode(), fields, request or None, float(leased_at))
