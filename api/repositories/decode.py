"""Decode values from Redis. They are untrusted: another version of scorepool may have written them, or another program.

A value that cannot be decoded counts as missing and is logged by its type. It never becomes a fault of the server.
"""

import logging
import math
from datetime import datetime
from typing import Any, TypeVar

from redis._parsers.base import BaseParser
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from scorepool import wire

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_TIME_S = 1e11  # unix; later times count as missing


class WrongRedisType(ResponseError):
    """Report that a key in Redis has a type other than the expected one."""


BaseParser.EXCEPTION_CLASSES["WRONGTYPE"] = WrongRedisType  # redis-py has no class for it


async def execute(pipeline: Pipeline) -> list[Any]:
    """Execute the pipeline. The reply is None for a command whose key has the wrong type. Raises RedisError."""
    found = await pipeline.execute(raise_on_error=False)
    for reply in found:
        if isinstance(reply, Exception) and not isinstance(reply, WrongRedisType):
            raise reply
    return [None if isinstance(reply, WrongRedisType) else reply for reply in found]


async def now_s(redis: Redis) -> float:
    """Return the unix time of Redis's clock, which decides for all processes."""
    return time_s(await redis.time())


def time_s(reply: tuple[int, int]) -> float:
    """Return the unix time of a reply to TIME."""
    seconds, microseconds = reply
    return seconds + microseconds / 1e6


def message(packed: object, message_type: type[T], message_format: wire.Format = "msgpack") -> T | None:
    """Decode a message of `wire`; None if it is missing or cannot be decoded."""
    if not isinstance(packed, bytes):
        return None
    try:
        return wire.parse(packed, message_type, message_format)
    except wire.Invalid:
        logger.warning("a %s in Redis cannot be decoded", getattr(message_type, "__name__", message_type))
        return None


def text(value: bytes | None) -> str:
    """Decode a string; empty if it is missing."""
    return value.decode(errors="replace") if value else ""


def unix_s(value: bytes | None) -> float | None:
    """Parse a unix time in seconds; None if it is missing or no time."""
    try:
        seconds = float(value or b"")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MAX_TIME_S else None


def parse_iso(value: bytes | None) -> float | None:
    """Convert RQ's `2026-01-31T12:00:00.000000Z` to a unix time in seconds; None if it is missing or no time."""
    try:
        return datetime.fromisoformat(text(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def number(value: bytes | None) -> int:
    """Parse a count; 0 if it is missing or not a number."""
    digits = value or b""
    return int(digits) if digits.isdigit() and len(digits) < 19 else 0
