"""Deliveries of webhooks, as their owners see them: read, listed, replayed; and test events."""

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.repositories import decode as stored
from scorepool.api.repositories.jobs import CURSOR
from scorepool.store.job_hash import iso_now
from scorepool.store.scripts import load

FIELDS = ("owner", "event", "job", "batch", "endpoint", "url", "status", "since", "created_at", "reason", "attempts")
_ID = re.compile(r"wh_[0-9a-f]{32}(-[0-9]{1,9})?(_[0-9a-f]{16})?")
_EVENTS = (*wire.ALL_EVENTS, "webhook.test")
_STATES: dict[str, wire.DeliveryState] = {"finished": "delivered", "failed": "failed", "canceled": "failed"}
SCAN = 200  # deliveries looked at per round trip
MAX_SCANNED = 2000  # per page: a filter that matches little gives short pages, not slow ones
SCHEDULED = f"rq:scheduled:{store.WEBHOOKS}"


class Deliveries:
    def __init__(self, redis: Redis, settings: store.Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._replay = redis.register_script(load("replay.lua"))
        self._deliver = redis.register_script(store.OUTBOX + load("deliver.lua"))

    async def read(self, owner: str, id: str) -> wire.Delivery:  # noqa: A002
        """With all attempts. Raises NotFound."""
        [delivery] = await self._read(owner, [id] if _ID.fullmatch(id) else [], shown=None) or [None]
        if delivery is None:
            raise _absent(id)
        return delivery

    async def page(
        self,
        owner: str,
        state: wire.DeliveryState | None,
        endpoint_id: str | None,
        cursor: str | None,
        limit: int,
    ) -> wire.DeliveryPage:
        """Raises BadRequest. A page may be shorter than `limit`, even empty, while `next_cursor` is set."""
        if cursor is not None and not re.fullmatch(CURSOR, cursor):
            raise BadRequest(f"cursor: expected a `next_cursor` of an earlier page, found {cursor[:40]!r}", "cursor")
        found: list[wire.Delivery] = []
        position = cursor
        for _ in range(MAX_SCANNED // SCAN):
            entries = await self._scan(owner, position)
            deliveries = await self._read(owner, [id_ for id_, _ in entries], shown=1)
            for (_, made), delivery in zip(entries, deliveries, strict=True):
                position = made
                if delivery and state in (None, delivery.state) and endpoint_id in (None, delivery.endpoint_id):
                    found.append(delivery)
                if len(found) == limit:
                    return wire.DeliveryPage(deliveries=found, next_cursor=position)
            if len(entries) < SCAN:
                return wire.DeliveryPage(deliveries=found)
        return wire.DeliveryPage(deliveries=found, next_cursor=position)

    async def replay(self, owner: str, id: str) -> wire.Delivery:  # noqa: A002
        """Whatever became of it, unless it is being delivered now. Raises NotFound, Conflict."""
        [answer] = await self._put_back(owner, [id], only_failed=False) if _ID.fullmatch(id) else ["absent"]
        if answer == "absent":
            raise _absent(id)
        if answer != "replayed":
            raise Conflict("the delivery is on its way; replay it when that has come to an end", "id")
        return await self.read(owner, id)

    async def replay_failed(self, owner: str, replay: wire.ReplayRequest) -> int:
        """Returns how many were put back."""
        num_replayed, position = 0, None
        while True:
            entries = await self._scan(owner, position, since=replay.since)
            deliveries = await self._read(owner, [id_ for id_, _ in entries], shown=1)
            ids = [
                delivery.id
                for delivery in deliveries
                if delivery and delivery.state == "failed" and replay.endpoint_id in (None, delivery.endpoint_id)
            ]
            answers = await self._put_back(owner, ids, only_failed=True) if ids else []
            num_replayed += answers.count("replayed")
            if len(entries) < SCAN:
                return num_replayed
            position = entries[-1][1]

    async def test(self, owner: str, endpoint: wire.WebhookEndpoint) -> wire.Delivery:
        """A delivery of `webhook.test`. Raises Conflict."""
        if endpoint.disabled_at is not None:
            raise Conflict(f"the endpoint is disabled: {endpoint.disabled_reason}; enable it first", "endpoint_id")
        id_ = store.Keys.delivery(uuid4().hex)
        await self._deliver(args=[id_, owner, endpoint.id, iso_now(), self._settings.result_ttl_s])
        return await self.read(owner, id_)

    async def _put_back(self, owner: str, ids: Sequence[str], only_failed: bool) -> list[str]:
        bell = store.Keys.wakeup(store.WEBHOOKS)
        terms: list[str | int] = [owner, store.WEBHOOKS, bell, f"{time.time():.6f}", iso_now(), int(only_failed)]
        return [answer.decode() for answer in await self._replay(args=[*terms, *ids])]

    async def _scan(self, owner: str, before: str | None, since: float | None = None) -> list[tuple[str, str]]:
        """The next deliveries of the owner, newest first, each with its place in the list."""
        entries: Any = await self._redis.zrevrangebyscore(
            store.Keys.deliveries(owner),
            f"({before}" if before else "+inf",
            "-inf" if since is None else since,
            start=0,
            num=SCAN,
            withscores=True,
        )
        return [(stored.text(id_), f"{made:.6f}") for id_, made in entries]

    async def _read(self, owner: str, ids: Iterable[str], shown: int | None) -> list[wire.Delivery | None]:
        """None for one that expired, that is not the owner's, or that tells of no event. `shown`: how many of the
        attempts, from the latest."""
        ids = list(ids)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id_ in ids:
                pipeline.hmget(f"rq:job:{id_}", FIELDS)
                pipeline.zscore(SCHEDULED, id_)
            rows = await stored.replies(pipeline)
        return [
            _delivery(id_, dict(zip(FIELDS, fields, strict=True)), due_at, shown)
            if fields and fields[0] == owner.encode() and stored.text(fields[1]) in _EVENTS
            else None
            for id_, fields, due_at in zip(ids, rows[::2], rows[1::2], strict=True)
        ]


def _delivery(id: str, fields: dict[str, bytes | None], due_at: float | None, shown: int | None) -> wire.Delivery:  # noqa: A002
    text = {name: stored.text(value) for name, value in fields.items() if value}
    attempts = stored.message(fields["attempts"], list[wire.DeliveryAttempt], "json") or []
    return wire.Delivery(
        id=id,
        state=_STATES.get(text.get("status", ""), "pending"),
        event=text["event"],  # type: ignore[arg-type]
        job_id=text.get("job"),
        batch_id=text.get("batch"),
        endpoint_id=text.get("endpoint"),
        url=text["url"].partition("?")[0] if "url" in text else None,
        created_at=stored.moment_s(fields["created_at"]),
        next_attempt_at=due_at,
        reason=text.get("reason"),
        attempts=attempts if shown is None else attempts[-shown:],
    )


def _absent(id: str) -> NotFound:  # noqa: A002
    return NotFound(f"no delivery {id[:80]!r}; deliveries are kept for a limited time after their end", "id")
