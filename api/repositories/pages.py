"""Lists of an owner's files and batches: sorted sets of ids by time of creation, read in pages as OpenAI's SDK does."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool.api.dialects.openai.files import FILE_KEPT_S
from scorepool.api.http.errors import BadRequest
from scorepool.api.repositories import decode

T = TypeVar("T")
SCAN = 200
LONGEST_KEPT_S = 2 * FILE_KEPT_S  # a batch with the longest window, from its creation


def add_to_list(pipeline: Pipeline, key: str, item_id: str, created_at: float, ttl_s: int) -> None:
    """Add the commands that list an item for at least `ttl_s`. The list expires with the item that is kept longest."""
    pipeline.expire(key, LONGEST_KEPT_S, nx=True)  # a list of the previous release, which set no expiry
    pipeline.zadd(key, {item_id: created_at}, nx=True)
    pipeline.zremrangebyscore(key, "-inf", created_at - LONGEST_KEPT_S)
    pipeline.expire(key, ttl_s, nx=True)  # GT leaves a key without an expiry alone
    pipeline.expire(key, ttl_s, gt=True)


async def page_of(
    redis: Redis,
    index: str,
    after: str | None,
    limit: int,
    read: Callable[[Sequence[str]], Awaitable[Sequence[T | None]]],
    newest_first: bool = True,
) -> tuple[list[T], bool]:
    """Return what `read` returns for the ids of a sorted set that follow `after`, and whether there are more.

    Ids for which `read` returns None are skipped: they have expired or do not match. Raises BadRequest.
    """
    first = 0
    if after is not None:
        rank: Any = await (redis.zrevrank if newest_first else redis.zrank)(index, after)
        if rank is None:
            raise BadRequest(f"after: expected the id of one of yours, found {after[:64]!r}", "after")
        first = rank + 1
    found: list[T] = []
    while True:
        ids: Any = await redis.zrange(index, first, first + SCAN - 1, desc=newest_first)
        found += [one for one in await read([decode.text(item_id) for item_id in ids]) if one is not None]
        if len(found) > limit or len(ids) < SCAN:
            return found[:limit], len(found) > limit
        first += SCAN
