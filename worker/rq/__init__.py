"""RQ's side of a worker: loop, leases, commit. It does not depend on an engine.

Importing it changes two libraries for the whole process: RQ loses pickle (job.py), and redis-py gets classes for the
replies of a Redis that refuses commands for a while (connection.py).
"""

from scorepool.worker.rq import connection, job

__all__ = ["connection", "job"]
