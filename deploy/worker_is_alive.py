"""Check the health of a container with an RQ worker: exit with 0 if Redis knows a worker of this host.

A worker renews its entry with every heartbeat. The entry of a stuck or dead worker expires.
"""

import os
import socket
import sys

from redis import Redis

redis = Redis.from_url(os.environ["SCOREPOOL_REDIS_URL"], socket_timeout=3, decode_responses=True)
hosts = [redis.hget(key, "hostname") for key in redis.smembers("rq:workers")]
sys.exit(socket.gethostname() not in hosts)
