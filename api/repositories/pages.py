"""Keep lists of what an owner has, sorted sets of ids by time of creation, and read them in pages.

A page of the native API continues at a cursor, the time of an item. A page of OpenAI's continues after an item's id.
"""

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import wire
from scorepool.api.http.errors import BadRequest
from scorepool.api.repositories import decode
from scorepool.store.scripts import load

T = TypeVar("T")
CURSOR = r"^[0-9]{1,12}\.[0-9]{6}$"  # the time at which an item was created (unix, s)
SCAN_SIZE = 200  # items that are read in one round trip while a page is filled
MAX_SCANNED = 2000  # per page, so that a filter with few matches gives short pages and not slow ones
_ADD = load("add_to_list.lua")


def add_to_list(pipeline: Pipeline, key: str, item_id: str, created_at: float, ttl_s: int) -> None:
    """Add the command that lists an item for at least `ttl_s`. `created_at` is a unix time, s."""
    pipeline.eval(_ADD, 0, key, item_id, created_at, ttl_s)


def check_cursor(cursor: str | None) -> None:
    """Check the form of a cursor. Raises BadRequest."""
    if cursor is not None and not re.fullmatch(CURSOR, cursor):
        raise BadRequest(f"cursor: expected the `next_cursor` of an earlier page, found {wire.quote(cursor)}", "cursor")


async def page_before(
    cursor: str | None, limit: int, scan: Callable[[str | None], Awaitable[Sequence[tuple[str, T | None]]]]
) -> tuple[list[T], str | None]:
    """Return up to `limit` items, newest first, and the cursor of the next page: None after the last one.

    `scan` returns the next SCAN_SIZE items before a cursor, each with its own cursor; None stands for an item that has
    expired or does not match. The page may be short, even empty, if it has a next one. Raises BadRequest.
    """
    check_cursor(cursor)
    found: list[T] = []
    for _ in range(MAX_SCANNED // SCAN_SIZE):
        scanned = await scan(cursor)
        for cursor, item in scanned:
            if item is not None:
                found.append(item)
            if len(found) == limit:
                return found, cursor
        if len(scanned) < SCAN_SIZE:
            return found, None
    return found, cursor


def merge_pages(
    pages: Sequence[tuple[Sequence[T], str | None]], limit: int, created_at: Callable[[T], float]
) -> tuple[list[T], str | None]:
    """Merge pages of several lists that began at the same cursor: items, newest first, and the cursor of the next page.

    Items of one time are not divided, because the cursor is a time: if more than `limit` are the newest, all are
    returned.
    """
    # Before this time, a page that is not its list's last says nothing.
    horizon = max((float(cursor) for _, cursor in pages if cursor), default=-math.inf)
    items = (item for page, _ in pages for item in page)
    found = sorted((item for item in items if created_at(item) >= horizon), key=created_at, reverse=True)
    if len(found) > limit:
        cut = created_at(found[limit])
        kept = [item for item in found if created_at(item) > cut]
        found = kept or [item for item in found if created_at(item) == cut]
        horizon = created_at(found[-1])
    return found, None if horizon == -math.inf else f"{horizon:.6f}"


async def page_after(
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
            raise BadRequest(f"after: expected the id of one of yours, found {wire.quote(after)}", "after")
        first = rank + 1
    found: list[T] = []
    while True:
        ids: Any = await redis.zrange(index, first, first + SCAN_SIZE - 1, desc=newest_first)
        found += [one for one in await read([decode.text(item_id) for item_id in ids]) if one is not None]
        if len(found) > limit or len(ids) < SCAN_SIZE:
            return found[:limit], len(found) > limit
        first += SCAN_SIZE
