"""What lies in Redis, read with suspicion: another version may have written it, or nobody of ours.

Nothing of it may be a fault of the server's. What cannot be read is not there, and the log names its kind.
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
from scorepool.api.http.formats import Format

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_TIME_S = 1e11  # unix; a time beyond it is none


class WrongRedisType(ResponseError):
    """A key holds another of Redis's types than ours do."""


BaseParser.EXCEPTION_CLASSES["WRONGTYPE"] = WrongRedisType  # redis-py knows no class of it


async def replies(pipeline: Pipeline) -> list[Any]:
    """Of each command; None where its key is foreign. Raises RedisError."""
    found = await pipeline.execute(raise_on_error=False)
    for reply in found:
        if isinstance(reply, Exception) and not isinstance(reply, WrongRedisType):
            raise reply
    return [None if isinstance(reply, WrongRedisType) else reply for reply in found]


async def now_s(redis: Redis) -> float:
    """Unix time by Redis's clock: what all processes go by where it decides anything."""
    seconds, microseconds = await redis.time()
    return float(seconds) + float(microseconds) / 1e6


def message(packed: object, kind: type[T], form: Format) -> T | None:
    if not isinstance(packed, bytes):
        return None
    try:
        return wire.parse(packed, kind, form)
    except wire.Invalid:
        logger.warning("a %s in Redis cannot be read", getattr(kind, "__name__", kind))
        return None


def text(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else ""


def unix_s(value: bytes | None) -> float | None:
    """From seconds, as a number."""
    try:
        seconds = float(value or b"")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MAX_TIME_S else None


def moment_s(value: bytes | None) -> float | None:
    """From RQ's `2026-01-31T12:00:00.000000Z`."""
    try:
        return datetime.fromisoformat(text(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def number(value: bytes | None) -> int:
    """0 where it is none."""
    digits = value or b""
    return int(digits) if digits.isdigit() and len(digits) < 19 else 0
