"""Check that a worker has the Redis of its models, where SCOREPOOL_REDIS_URLS spreads models over several servers.

`rq worker` is given a URL of its own. On another server than that of its models a worker would wait for jobs for ever.
"""

from collections.abc import Iterable
from typing import Any

import redis
from redis.exceptions import RedisError

from scorepool.store import ServerMap, Settings, SettingsError
from scorepool.worker.rq.connection import Redis


def check_own_server(connection: redis.Redis, settings: Settings, names: Iterable[str]) -> None:
    """Raise SettingsError if the map puts these models, with their aliases, elsewhere, or on several servers."""
    servers = ServerMap.load(settings)
    if servers.is_one:
        return
    names = list(names)
    server = servers.of_worker(names)
    try:
        with Redis.from_url(server.url) as wanted:
            ids = (_identity(wanted), _identity(connection))
    except RedisError as error:
        raise SettingsError(f"{server.setting}: no Redis answers at the URL: {error}") from None
    if None not in ids and ids[0] != ids[1]:
        raise SettingsError(
            f"this worker is connected to another Redis than that of {names[0]!r}, which {server.setting} names: give "
            "`rq worker` its URL in RQ_REDIS_URL, or use `scorepool worker`"
        )


def _identity(connection: redis.Redis) -> tuple[str, int] | None:
    """Return what tells a server and its database from others; None if it does not say it."""
    info: Any = connection.info("server")
    run_id = info.get("run_id")
    return (str(run_id), int(connection.connection_pool.connection_kwargs.get("db") or 0)) if run_id else None
