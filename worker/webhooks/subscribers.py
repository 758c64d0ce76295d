"""The endpoints that owners registered: what a delivery to one of them needs, read when it is due."""

import time

from redis import Redis
from redis.client import Pipeline

from scorepool.store import Keys
from scorepool.wire import Invalid, Subscriber, encode_json, parse

FRESH_S = 1.0  # how long an endpoint that was read answers for
MAX_KNOWN = 10_000


class Subscribers:
    """For one thread, but `disable`."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._known: dict[tuple[str, str], tuple[float, Subscriber | None]] = {}

    def get(self, owner: str, id: str) -> Subscriber | None:  # noqa: A002
        """None if the owner has deleted it."""
        read_at, subscriber = self._known.get((owner, id), (float("-inf"), None))
        if time.monotonic() - read_at > FRESH_S:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            subscriber = _read(self._connection.hget(Keys.endpoints(owner), id))
            self._known[owner, id] = (time.monotonic(), subscriber)
        return subscriber

    def disable(self, owner: str, id: str, reason: str) -> None:  # noqa: A002
        """Until its owner enables it. Nothing happens to one that was deleted or is disabled already."""
        key = Keys.endpoints(owner)

        def write(pipeline: Pipeline) -> None:
            subscriber = _read(pipeline.hget(key, id))
            pipeline.multi()
            if subscriber is not None and subscriber.endpoint.disabled_at is None:
                pipeline.hset(key, id, encode_json(subscriber.as_disabled(time.time(), reason)))

        self._connection.transaction(write, key)


def _read(text: object) -> Subscriber | None:
    """What is no Subscriber cannot be delivered to, whoever wrote it."""
    if not isinstance(text, bytes):
        return None
    try:
        return parse(text, Subscriber)
    except Invalid:
        return None
