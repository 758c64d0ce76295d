"""Registered endpoints, read from Redis when a delivery to them is due."""

from redis import Redis
from redis.client import Pipeline

from scorepool.store import Keys
from scorepool.wire import Invalid, Subscriber, encode_json, parse
from scorepool.worker.rq.clock import REDIS_CLOCK, clock_s

CACHE_TTL_S = 1.0
MAX_CACHED = 10_000


class Subscribers:
    """A short-lived cache of endpoints. Only `disable` may be called from other threads."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._cache: dict[tuple[str, str], tuple[float, Subscriber | None]] = {}

    def get(self, owner: str, endpoint_id: str) -> Subscriber | None:
        """Return the endpoint, or None if its owner deleted it."""
        read_at, subscriber = self._cache.get((owner, endpoint_id), (float("-inf"), None))
        if clock_s() - read_at > CACHE_TTL_S:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            subscriber = _decode(self._connection.hget(Keys.endpoints_of(owner), endpoint_id))
            self._cache[owner, endpoint_id] = (clock_s(), subscriber)
        return subscriber

    def disable(self, owner: str, endpoint_id: str, url: str, reason: str) -> None:
        """Disable the endpoint until its owner enables it.

        Does nothing if it was deleted, is disabled already, or has another URL by now.
        """
        key = Keys.endpoints_of(owner)

        def write(pipeline: Pipeline) -> None:
            subscriber = _decode(pipeline.hget(key, endpoint_id))
            pipeline.multi()
            if subscriber is None:
                return
            if subscriber.endpoint.disabled_at is None and subscriber.endpoint.url == url:
                pipeline.hset(key, endpoint_id, encode_json(subscriber.as_disabled(REDIS_CLOCK.now_s(), reason)))

        self._connection.transaction(write, key)


def _decode(value: object) -> Subscriber | None:
    """Decode an endpoint. Data in Redis is untrusted: a value that cannot be decoded counts as missing."""
    if not isinstance(value, bytes):
        return None
    try:
        return parse(value, Subscriber)
    except Invalid:
        return None
