"""Read, list and replay webhook deliveries in Redis for their owners, and send test events."""

import re
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import Conflict, NotFound, TooManyEvents
from scorepool.api.http.turns import Turns
from scorepool.api.repositories import decode
from scorepool.api.repositories.owned import read_owned
from scorepool.api.repositories.pages import SCAN_SIZE, page_before
from scorepool.store import JobField
from scorepool.store.scripts import load

FIELDS = (
    *(JobField.EVENT, JobField.JOB, JobField.BATCH, JobField.ENDPOINT, JobField.URL),
    *(JobField.STATUS, JobField.SCHEDULED_FROM, JobField.CREATED_AT, JobField.REASON, JobField.ATTEMPTS),
)
_ID = re.compile(r"wh_[0-9a-f]{32}(-[0-9]{1,9})?(_[0-9a-f]{16})?")
_EVENTS = (*wire.ALL_EVENTS, "webhook.test")
_STATES: dict[str, wire.DeliveryState] = {"finished": "delivered", "failed": "failed", "canceled": "failed"}
MAX_ASKED_FOR = 60  # tests and replays of one owner within WINDOW_S: each sends events to a URL that the owner chose
WINDOW_S = 60
SCHEDULED = store.RqKeys.registry("scheduled", store.WEBHOOKS)


class WebhookDeliveries:
    """Read and replay the deliveries of every owner: RQ jobs on the webhooks queue."""

    def __init__(self, redis: Redis, settings: store.Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._replays = Turns()
        self._replay = redis.register_script(load("replay.lua"))
        self._deliver = redis.register_script(load("send_test_event.lua"))

    async def read(self, owner: str, delivery_id: str) -> wire.Delivery:
        """Return a delivery with all its attempts; raise NotFound."""
        if _ID.fullmatch(delivery_id):
            [delivery] = await self._read(owner, [delivery_id], num_attempts=None)
            if delivery is not None:
                return delivery
        raise _delivery_not_found(delivery_id)

    async def page(
        self,
        owner: str,
        state: wire.DeliveryState | None,
        endpoint_id: str | None,
        cursor: str | None,
        limit: int,
    ) -> wire.DeliveryPage:
        """Read a page of deliveries, newest first. It may be short, even empty, if `next_cursor` is set.

        Raises BadRequest.
        """
        found, next_cursor = await self.find(owner, state, endpoint_id, cursor, limit)
        return wire.DeliveryPage(deliveries=[delivery for _, delivery in found], next_cursor=next_cursor)

    async def find(
        self, owner: str, state: wire.DeliveryState | None, endpoint_id: str | None, cursor: str | None, limit: int
    ) -> tuple[list[tuple[float, wire.Delivery]], str | None]:
        """Return the deliveries of a page, each with the time by which it is listed, unix, s, and the next cursor."""

        async def scan(before: str | None) -> list[tuple[str, tuple[float, wire.Delivery] | None]]:
            entries = await self._scan(owner, before)
            deliveries = await self._read(owner, [delivery_id for delivery_id, _ in entries], num_attempts=1)
            return [
                (
                    created,
                    (float(created), one)
                    if one and state in (None, one.state) and endpoint_id in (None, one.endpoint_id)
                    else None,
                )
                for (_, created), one in zip(entries, deliveries, strict=True)
            ]

        return await page_before(cursor, limit, scan)

    async def replay(self, owner: str, delivery_id: str) -> wire.Delivery:
        """Queue a delivered or failed event again; raise NotFound, Conflict if it is pending, TooManyEvents."""
        if not _ID.fullmatch(delivery_id):
            raise _delivery_not_found(delivery_id)
        await self._count(owner)
        [answer] = await self._requeue(owner, [delivery_id], only_failed=False)
        if answer == "absent":
            raise _delivery_not_found(delivery_id)
        if answer != "replayed":
            raise Conflict("the delivery is pending; replay it after it was delivered or has failed", "id")
        return await self.read(owner, delivery_id)

    async def replay_failed(self, owner: str, replay: wire.ReplayRequest) -> int:
        """Queue the owner's failed deliveries again and return how many there were. Raises TooManyEvents."""
        await self._count(owner)
        num_replayed, position = 0, None
        while True:
            async with self._replays.turn(owner):  # many requests at once would read many pages at once
                entries = await self._scan(owner, position, since=replay.since)
                deliveries = await self._read(owner, [delivery_id for delivery_id, _ in entries], num_attempts=1)
                ids = [
                    delivery.id
                    for delivery in deliveries
                    if delivery and delivery.state == "failed" and replay.endpoint_id in (None, delivery.endpoint_id)
                ]
                answers = await self._requeue(owner, ids, only_failed=True) if ids else []
            num_replayed += answers.count("replayed")
            if len(entries) < SCAN_SIZE:
                return num_replayed
            position = entries[-1][1]

    async def test(self, owner: str, endpoint: wire.WebhookEndpoint) -> wire.Delivery:
        """Queue a delivery of `webhook.test`; raise Conflict if the endpoint is disabled, or TooManyEvents."""
        if endpoint.disabled_at is not None:
            raise Conflict(f"the endpoint is disabled: {endpoint.disabled_reason}; enable it first", "endpoint_id")
        await self._count(owner)
        delivery_id = store.Keys.delivery(uuid4().hex)
        await self._deliver(args=[delivery_id, owner, endpoint.id, self._settings.result_ttl_s])
        return await self.read(owner, delivery_id)

    async def _count(self, owner: str) -> None:
        """Count a test or a replay; raise TooManyEvents if there were too many."""
        key = store.Keys.events_asked_for(owner)
        async with self._redis.pipeline() as pipeline:
            pipeline.set(key, 0, ex=WINDOW_S, nx=True)
            pipeline.incr(key)
            pipeline.ttl(key)
            _, count, left_s = await pipeline.execute()
        if count > MAX_ASKED_FOR:
            raise TooManyEvents(
                f"you asked for more than {MAX_ASKED_FOR} tests and replays of webhooks in {WINDOW_S} s", max(1, left_s)
            )

    async def _requeue(self, owner: str, ids: Sequence[str], only_failed: bool) -> list[str]:
        answers = await self._replay(args=[owner, int(only_failed), *ids])
        return [answer.decode() for answer in answers]

    async def _scan(self, owner: str, before: str | None, since: float | None = None) -> list[tuple[str, str]]:
        """Return up to SCAN_SIZE deliveries of the owner, newest first: id and position in the list."""
        entries: Any = await self._redis.zrevrangebyscore(
            store.Keys.deliveries_of(owner),
            f"({before}" if before else "+inf",
            "-inf" if since is None else since,
            start=0,
            num=SCAN_SIZE,
            withscores=True,
        )
        return [(decode.text(delivery_id), f"{created:.6f}") for delivery_id, created in entries]

    async def _read(self, owner: str, ids: Iterable[str], num_attempts: int | None) -> list[wire.Delivery | None]:
        """Return deliveries with their latest `num_attempts`; None for one that is gone, invalid or another owner's."""
        ids = list(ids)
        rows = await read_owned(self._redis, owner, [store.RqKeys.job(delivery_id) for delivery_id in ids], FIELDS)
        found = {
            delivery_id: row
            for delivery_id, row in zip(ids, rows, strict=True)
            if row and decode.text(row[FIELDS.index(JobField.EVENT)]) in _EVENTS
        }
        async with self._redis.pipeline(transaction=False) as pipeline:
            for delivery_id in found:
                pipeline.zscore(SCHEDULED, delivery_id)
            due_at = dict(zip(found, await decode.execute(pipeline), strict=True))
        return [
            _delivery(
                delivery_id, dict(zip(FIELDS, found[delivery_id], strict=True)), due_at[delivery_id], num_attempts
            )
            if delivery_id in found
            else None
            for delivery_id in ids
        ]


def _delivery(
    delivery_id: str, fields: dict[str, bytes | None], due_at: float | None, num_attempts: int | None
) -> wire.Delivery:
    text = {name: decode.text(value) for name, value in fields.items() if value}
    attempts = decode.message(fields[JobField.ATTEMPTS], list[wire.DeliveryAttempt], "json") or []
    return wire.Delivery(
        id=delivery_id,
        state=_STATES.get(text.get(JobField.STATUS, ""), "pending"),
        event=text[JobField.EVENT],  # type: ignore[arg-type]
        job_id=text.get(JobField.JOB),
        batch_id=text.get(JobField.BATCH),
        endpoint_id=text.get(JobField.ENDPOINT),
        url=text[JobField.URL].partition("?")[0] if JobField.URL in text else None,
        created_at=decode.parse_iso(fields[JobField.CREATED_AT]),
        next_attempt_at=due_at,
        reason=text.get(JobField.REASON),
        attempts=attempts if num_attempts is None else attempts[-num_attempts:],
    )


def _delivery_not_found(delivery_id: str) -> NotFound:
    return NotFound(f"no delivery {wire.quote(delivery_id)}; deliveries are kept for a limited time", "id")
