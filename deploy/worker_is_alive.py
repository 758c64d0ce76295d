"""Check the health of a container with an RQ worker: exit with 0 if Redis knows a worker of this host.

A worker renews its entry with every heartbeat. The entry of a stuck or dead worker expires.
"""

import os
import socket
import sys

from redis import Redis

url = os.environ.get("RQ_REDIS_URL") or os.environ["SCOREPOOL_REDIS_URL"]  # of several servers, the worker's own
redis = Redis.from_url(url, socket_timeout=3, decode_responses=True)
hosts = [redis.hget(key, "hostname") for key in redis.smembers("rq:workers")]
sys.exit(socket.gethostname() not in hosts)
