"""Read what an operator watches of all servers, as one snapshot."""

import asyncio
from typing import Any, TypeVar

from msgspec import Struct, structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scorepool.api.metrics.queue_snapshot import QueueSnapshot, QueueSnapshots
from scorepool.api.repositories.reach import Reach
from scorepool.api.repositories.shared_read import SharedRead
from scorepool.api.spread.spread_models import SpreadModels
from scorepool.store import WEBHOOKS, ServerMap

T = TypeVar("T")


class SpreadSnapshots(QueueSnapshots):
    """The snapshots of all servers that answer, added up."""

    def __init__(self, servers: ServerMap, redis: list[Redis], models: SpreadModels, reach: Reach) -> None:
        self._servers = servers
        self._all = redis
        self._spread = models
        self._reach = reach
        self._shared = SharedRead(self._read)

    async def _read(self) -> QueueSnapshot:
        """Raises RedisError if no server answers."""
        await self._spread.live()
        read = await asyncio.gather(*map(self._read_one, range(len(self._all))))
        errors = {index: each for index, each in enumerate(read) if not isinstance(each, QueueSnapshot)}
        found = [each for each in read if isinstance(each, QueueSnapshot)]
        if not found:
            raise next(iter(errors.values()))
        total = found[0]
        for other in found[1:]:
            total = add(total, other)
        live = sorted(total.live, key=lambda worker: (worker.host, worker.served.id, worker.served.worker))
        return structs.replace(
            total,
            live=live,
            workers=total.workers | {WEBHOOKS: min(each.workers[WEBHOOKS] for each in found)},  # each server needs one
            unreachable=[self._servers.servers[index].setting for index in sorted(errors)],
        )

    async def _read_one(self, index: int) -> QueueSnapshot | RedisError:
        try:
            return await self._reach.ask(index, QueueSnapshot.read(self._all[index], self._spread.live_on[index]))
        except RedisError as error:
            return error
        except OSError as error:
            return RedisError(str(error))


def add(one: T, other: T) -> T:
    """Add numbers up, join lists, and take the greater of two times, in dicts and structs field by field."""
    result: Any
    match one, other:
        case Struct(), Struct():
            names = structs.asdict(one)
            result = structs.replace(one, **{name: add(getattr(one, name), getattr(other, name)) for name in names})
        case dict(), dict():
            both = [*one, *(key for key in other if key not in one)]
            result = {
                key: add(one[key], other[key]) if key in one and key in other else (one | other)[key] for key in both
            }
        case float(), float():
            result = max(one, other)
        case _:
            result = one + other  # type: ignore[operator]
    return result  # type: ignore[no-any-return]
