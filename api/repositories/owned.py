"""Read hashes that belong to an owner.

What another owner has cannot be told from what is absent, neither by the reply nor by its cost.
"""

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool.store.scripts import load

_READ = load("read_owned.lua")

Row = list[bytes | None]


async def read_owned(
    redis: Redis | Pipeline, owner: str, keys: Sequence[str], fields: Sequence[str]
) -> list[Row | None]:
    """Return the values of these fields of each hash; None for one that is not the owner's. Raises RedisError.

    A pipeline must be watching, so that it runs the command at once.
    """
    rows: Any = await redis.eval(_READ, len(keys), *keys, owner, *fields) if keys else []
    return list(rows)
