"""List an owner's files and batches in pages, each after the last id of the one before, as OpenAI's SDK does."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from scorepool.api.http.errors import BadRequest
from scorepool.api.repositories import decode

T = TypeVar("T")
SCAN = 200


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
