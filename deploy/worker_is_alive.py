"""Health check of a container with an RQ worker: exit status 0 if a worker of this host is known to Redis.

A worker renews its entry with every beat; the entry of one that is stuck or dead expires by itself.
"""

import os
import socket
import sys

from redis import Redis

redis = Redis.from_url(os.environ["SCOREPOOL_REDIS_URL"], socket_timeout=3, decode_responses=True)
hosts = [redis.hget(key, "hostname") for key in redis.smembers("rq:workers")]
sys.exit(socket.gethostname() not in hosts)
