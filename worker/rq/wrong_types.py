"""Redis keys of a wrong type: found before a transaction is run, and logged.

Any client of Redis can write any key. A command on a key of a wrong type fails alone in a MULTI while the rest goes
through, so RQ's own methods would write half an end and raise. The scripts take the same care (store/lua/writes.lua).
"""

import time
from collections.abc import Iterable
from logging import Logger
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError
from rq.utils import as_text

LOG_INTERVAL_S = 60.0
_SIZES = {"hash": "HLEN", "zset": "ZCARD", "stream": "XLEN", "set": "SCARD", "list": "LLEN"}
# The type of key that a write expects. Writes that fit a key of any type (SET, DEL, EXPIRE) are not listed.
_EXPECTED = {
    **dict.fromkeys(("HSET", "HMSET", "HSETNX", "HDEL", "HINCRBY", "HINCRBYFLOAT"), "hash"),
    **dict.fromkeys(("ZADD", "ZREM", "ZREMRANGEBYSCORE"), "zset"),
    **dict.fromkeys(("XADD", "XTRIM"), "stream"),
    **dict.fromkeys(("SADD", "SREM"), "set"),
    "LREM": "list",
}


class WrongTypeLog:
    """Log each key of a wrong type once per LOG_INTERVAL_S."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}

    def report(self, wrong_types: Iterable[Iterable[str | bytes]]) -> None:
        """Log (key, expected type) pairs, as the scripts return them."""
        for key, expected in wrong_types:
            name = as_text(key)
            if time.monotonic() - self._logged_at.get(name, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
                self._logged_at[name] = time.monotonic()
                self._log.error(
                    "the Redis key %s is no %s, so it is not written; delete or rename it", name, as_text(expected)
                )


def drop_wrong_types(connection: Redis, pipeline: Pipeline) -> list[tuple[str, str]]:
    """Remove the writes of a buffered transaction whose key has a wrong type; return (key, expected type) pairs."""
    writes = [_key_and_type(arguments) for arguments, _ in pipeline.command_stack]
    expected = dict(write for write in writes if write is not None)
    with connection.pipeline(transaction=False) as probes:
        for key, kind in expected.items():
            probes.execute_command(_SIZES[kind], key)
        replies = probes.execute(raise_on_error=False)
    wrong = {key: kind for (key, kind), reply in zip(expected.items(), replies, strict=True) if is_wrong_type(reply)}
    if wrong:
        pipeline.command_stack = [
            command
            for command, write in zip(pipeline.command_stack, writes, strict=True)
            if write is None or write[0] not in wrong
        ]
    return list(wrong.items())


def is_wrong_type(reply: object) -> bool:
    """True if a command's reply says that its key has a wrong type."""
    return isinstance(reply, ResponseError) and "wrong kind of value" in str(reply)  # redis-py has no class for it


def _key_and_type(arguments: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return the key that a command writes and the type that it expects; None for a command that fits any type."""
    expected = _EXPECTED.get(arguments[0])
    return None if expected is None else (as_text(arguments[1]), expected)
