"""What Prometheus reads. No label holds an owner, an id, or a name that a caller made up."""

import time
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorepool import wire
from scorepool.api.metrics.queue_snapshot import QueueSnapshot

REPLY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One registry per application, so that two in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.replies = Histogram(
            "scorepool_http_reply_seconds",
            "From a request's first byte to its reply's last, waits included.",
            ("method", "route", "status"),
            buckets=REPLY_BUCKETS_S,
            registry=self.registry,
        )
        self.submitted = Counter(
            "scorepool_jobs_submitted_total", "Jobs accepted by this process.", ("kind",), registry=self.registry
        )
        self.replayed = Counter(
            "scorepool_jobs_replayed_total", "Jobs found under their Idempotency-Key.", registry=self.registry
        )
        self.ended = Counter(
            "scorepool_jobs_ended_total", "Jobs of any process whose end was seen here.", registry=self.registry
        )
        self.waits = Histogram(
            "scorepool_wait_seconds",
            "How long clients waited for a job, by whether it ended in time.",
            ("ended",),
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.waiting = Gauge("scorepool_clients_waiting", "Clients waiting for a job now.", registry=self.registry)
        self.redis_up = Gauge("scorepool_redis_up", "1 when Redis answered this scrape.", registry=self.registry)
        self.readings = QueueSnapshot(self.registry)
        for kind in get_args(wire.Kind):
            self.submitted.labels(kind)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class MetricsMiddleware:
    """ASGI middleware: measures replies by the route's template, so that ids make no labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            method = scope["method"] if route != "(none)" else "(any)"
            self._metrics.replies.labels(method, route, status).observe(time.monotonic() - started_at)
