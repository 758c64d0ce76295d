"""Redis keys of a wrong type: found before a transaction is run, and logged.

Any client of Redis can write any key. A command on a key of a wrong type fails alone in a MULTI while the rest goes
through, so RQ's own methods would write half an end and raise. The scripts take the same care (store/lua/writes.lua).
"""

import time
from collections.abc import Iterable
from logging import Logger

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError
from rq.utils import as_text

LOG_INTERVAL_S = 60.0
_TYPES = {"H": "hash", "Z": "zset", "X": "stream", "S": "set", "L": "list", "R": "list"}  # by a command's first letter
_SIZES = {"hash": "HLEN", "zset": "ZCARD", "stream": "XLEN", "set": "SCARD", "list": "LLEN"}
_OTHERS = frozenset({"SET", "SETEX", "PSETEX"})  # overwrite a key of any type
_ESSENTIAL = frozenset({"LPUSH", "RPUSH"})  # without them a job would be in no list


class WrongRedisType(Exception):
    """A key that a transaction cannot do without has a wrong type. Nothing was written."""


class WrongTypeLog:
    """Log each key of a wrong type once per LOG_INTERVAL_S."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}

    def report(self, wrong_types: Iterable[Iterable[str | bytes]]) -> None:
        """Log {key, expected type} pairs, as the scripts return them."""
        for key, expected in wrong_types:
            name = as_text(key)
            if time.monotonic() - self._logged_at.get(name, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
                self._logged_at[name] = time.monotonic()
                self._log.error(
                    "the Redis key %s is no %s, so it is not written; delete or rename it", name, as_text(expected)
                )


def drop_wrong_types(connection: Redis, pipeline: Pipeline) -> list[tuple[str, str]]:
    """Remove the commands of a buffered transaction whose key has a wrong type; return these keys.

    Raises WrongRedisType if a job could then not be put on its queue.
    """
    expected = {key: kind for command in pipeline.command_stack for key, kind in _written(command[0])}
    with connection.pipeline(transaction=False) as probes:
        for key, kind in expected.items():
            probes.execute_command(_SIZES[kind], key)
        replies = probes.execute(raise_on_error=False)
    wrong = {key: kind for (key, kind), reply in zip(expected.items(), replies, strict=True) if is_wrong_type(reply)}
    if not wrong:
        return []
    for arguments, _ in pipeline.command_stack:
        if arguments[0] in _ESSENTIAL and as_text(arguments[1]) in wrong:
            raise WrongRedisType(f"the Redis key {as_text(arguments[1])} is no list; delete or rename it")
    pipeline.command_stack = [
        command for command in pipeline.command_stack if not any(key in wrong for key, _ in _written(command[0]))
    ]
    return list(wrong.items())


def is_wrong_type(reply: object) -> bool:
    """True if a command's reply says that its key has a wrong type."""
    return isinstance(reply, ResponseError) and "wrong kind of value" in str(reply)  # redis-py has no class for it


def _written(arguments: tuple[object, ...]) -> list[tuple[str, str]]:
    """Return the key that a command writes with the type that it expects; nothing for commands that fit any type."""
    name = str(arguments[0]).upper()
    if name in _OTHERS or name not in _TYPED:
        return []
    return [(as_text(arguments[1]), _TYPES[name[0]])]  # type: ignore[arg-type]


_TYPED = frozenset(
    {
        *("HSET", "HMSET", "HSETNX", "HDEL", "HINCRBY", "HINCRBYFLOAT"),
        *("ZADD", "ZREM", "ZREMRANGEBYSCORE", "XADD", "XTRIM", "SADD", "SREM", "LPUSH", "RPUSH", "LREM"),
    }
)
