"""Tell workers to drop the KV caches of shared prompts."""

from collections.abc import Sequence

from redis.asyncio import Redis

from scorepool.api.http.errors import Unavailable
from scorepool.store import Keys


async def reset_prefix_caches(servers: Sequence[Redis]) -> None:
    """Tell all workers. Raises Unavailable if none listens."""
    if not any([await redis.publish(Keys.reset_prefix_cache, b"") for redis in servers]):
        raise Unavailable("no worker is live")
