"""Redis keys of a wrong type: found before a transaction is run, and logged.

Any client can write any type to any key. Redis fails the one command of a transaction whose key has a wrong type and
runs the others, so RQ's own methods would write half of an end and raise. Scripts use store/lua/wrong_types.lua.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """Log each key of a wrong type, or each operation that meets one, once per LOG_INTERVAL_S."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}

    def report(self, wrong_types: Iterable[Iterable[str | bytes]]) -> None:
        """Log (key, expected type) pairs, as the scripts return them."""
        for key, expected in wrong_types:
            name = as_text(key)
            self._error(name, f"the Redis key {name} is no {as_text(expected)}, so it is not written")

    @contextmanager
    def tolerate(self, operation: str) -> Iterator[None]:
        """Log the error of a command whose key has a wrong type. The other commands of its transaction were run."""
        try:
            yield
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._error(operation, f"{operation}: a Redis key has a wrong type ({error})")

    def _error(self, about: str, message: str) -> None:
        if time.monotonic() - self._logged_at.get(about, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_at[about] = time.monotonic()
            self._log.error("%s; delete or rename it", message)


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


def execute_reads(pipeline: Pipeline) -> list[Any]:
    """Run a pipeline of reads; return None in place of a reply if the key has a wrong type."""
    replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not is_wrong_type(reply):
            raise reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def has_type(connection: Redis, key: str, expected: str) -> bool:
    """True if a key has the expected type or is absent."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.execute_command(_SIZES[expected], key)
        return execute_reads(pipeline) != [None]


def is_wrong_type(reply: object) -> bool:
    """True if a command's reply says that its key has a wrong type."""
    return isinstance(reply, ResponseError) and "wrong kind of value" in str(reply)  # redis-py has no class for it


def _key_and_type(arguments: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return the key that a command writes and the type that it expects; None for a command that fits any type."""
    expected = _EXPECTED.get(arguments[0])
    return None if expected is None else (as_text(arguments[1]), expected)
