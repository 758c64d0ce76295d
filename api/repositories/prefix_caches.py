"""Tell workers to drop the KV caches of shared prompts."""

from redis.asyncio import Redis

from scorepool.api.http.errors import Unavailable
from scorepool.store import Keys


async def reset_prefix_caches(redis: Redis) -> None:
    """Tell all workers. Raises Unavailable if none listens."""
    if not await redis.publish(Keys.reset_prefix_cache, b""):
        raise Unavailable("no worker is live")
