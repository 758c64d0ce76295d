"""A connection to Redis for small messages that must not wait for a link that is gone.

Its timeouts follow from how long replies took, so that a half-open connection is given up in about a second on a fast
link, and a slow link has the time that it needs. The size of messages follows in the same way.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionInterface
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

FIRST_REPLY_S = 0.5  # assumed until a reply was measured
CONNECT_TIMEOUT_S = (0.5, 2.0)  # bounds, for the TCP connection and for each reply of the login
REPLY_TIMEOUT_S = (1.0, 10.0)  # bounds
TIMEOUT_FACTOR = 4  # times the longest recent reply
FAST_REPLY_S, SLOW_REPLY_S = 0.25, 1.0  # messages grow below the first, and shrink above the second
MESSAGE_BYTES = (2**10, 64 * 2**10, 2**20)  # least, first, most


class StreamConnection:
    """One connection, made when it is needed and again after an error. For one thread."""

    def __init__(self, redis: Redis) -> None:
        """Take address and login from the pool of `redis`."""
        self._pool: Any = redis.connection_pool
        self._connection: ConnectionInterface | None = None
        self._reply_s = FIRST_REPLY_S  # the longest of the last replies
        self._num_timeouts = 0  # since the last reply
        self.max_message_bytes = MESSAGE_BYTES[1]

    def run_script(self, script: str, keys: Sequence[str], arguments: Sequence[bytes | str | int]) -> Any:
        """Run a script and return its reply. Raises RedisError; it is then not known whether the script ran."""
        connection = self._connected()
        command = [len(keys), *keys, *arguments]
        num_bytes = sum(len(argument) for argument in arguments if isinstance(argument, bytes))
        started_at = time.monotonic()
        try:
            try:
                sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
                reply = self._call(connection, "EVALSHA", sha, *command)
            except NoScriptError:
                reply = self._call(connection, "EVAL", script, *command)
        except RedisTimeoutError:
            self.close()
            self._num_timeouts += 1
            self.max_message_bytes = max(MESSAGE_BYTES[0], self.max_message_bytes // 4)
            raise
        except RedisConnectionError:
            self.close()
            raise
        self._measure(time.monotonic() - started_at, num_bytes)
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    def _connected(self) -> ConnectionInterface:
        if self._connection is None:
            timeout_s = _clamp(TIMEOUT_FACTOR * self._reply_s, CONNECT_TIMEOUT_S)
            options = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
            connection = self._pool.connection_class(**self._pool.connection_kwargs | options)
            connection.connect()
            self._connection = connection
        return self._connection

    def _call(self, connection: ConnectionInterface, *command: Any) -> Any:
        timeout_s = _clamp(TIMEOUT_FACTOR * self._reply_s * 2**self._num_timeouts, REPLY_TIMEOUT_S)
        connection.send_command(*command)
        if not connection.can_read(timeout_s):
            raise RedisTimeoutError(f"no reply within {timeout_s:.1f} s")
        return connection.read_response()

    def _measure(self, reply_s: float, num_bytes: int) -> None:
        self._num_timeouts = 0
        self._reply_s = max(reply_s, 0.9 * self._reply_s)
        least, _, most = MESSAGE_BYTES
        if reply_s > SLOW_REPLY_S:
            self.max_message_bytes = max(least, self.max_message_bytes // 2)
        elif reply_s < FAST_REPLY_S and num_bytes > self.max_message_bytes // 2:
            self.max_message_bytes = min(most, self.max_message_bytes * 2)


def _clamp(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
