"""Render metrics for Prometheus. No label holds an owner, an id, or a name that a client made up."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorepool import wire
from scorepool.api.http.errors import METHODS
from scorepool.api.metrics.engine_gauges import engine_gauges
from scorepool.api.metrics.queue_snapshot import QueueSnapshot, ResultCacheState

REPLY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Hold one registry per application, so that two applications in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.replies = Histogram(
            "scorepool_http_reply_seconds",
            "Seconds from the first byte of a request to the last of its reply, waits included.",
            ("method", "route", "status"),
            buckets=REPLY_BUCKETS_S,
            registry=self.registry,
        )
        self.submitted = Counter(
            "scorepool_jobs_submitted_total", "Jobs that this process accepted.", ("kind",), registry=self.registry
        )
        self.replayed = Counter(
            "scorepool_jobs_replayed_total",
            "Submissions that were answered with the job of an earlier one, by their Idempotency-Key.",
            registry=self.registry,
        )
        self.ended = Counter(
            "scorepool_jobs_ended_total",
            "Jobs that ended, submitted through any process, as read by this process.",
            registry=self.registry,
        )
        self.waits = Histogram(
            "scorepool_wait_seconds",
            "Seconds that clients waited for a job, by whether it ended in that time.",
            ("ended",),
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.waiting = Gauge("scorepool_clients_waiting", "Clients that wait for a job now.", registry=self.registry)
        self.redis_up = Gauge(
            "scorepool_redis_up", "1 if Redis answered this scrape, all servers of it, else 0.", registry=self.registry
        )
        self._snapshot = SnapshotCollector()
        self.registry.register(self._snapshot)
        for kind in get_args(wire.Kind):
            self.submitted.labels(kind)

    def render(self, snapshot: QueueSnapshot | None) -> bytes:
        """Render all metrics as text; None if Redis did not answer, so that old values are not shown.

        Counters are left out unless all servers answered: a sum that falls and rises again would count twice.
        """
        self._snapshot.snapshot = EMPTY if snapshot is None else _without_counters(snapshot)
        self.redis_up.set(0 if snapshot is None or snapshot.unreachable else 1)
        return generate_latest(self.registry)


EMPTY = QueueSnapshot(
    jobs={},
    oldest_s={},
    workers={},
    heartbeat_age_s={},
    stopped={},
    links={},
    live=[],
    crosschecks={},
    deliveries={},
    outcomes={},
)


def _without_counters(snapshot: QueueSnapshot) -> QueueSnapshot:
    """Return a snapshot without counters if it is not that of all servers."""
    if not snapshot.unreachable:
        return snapshot
    return replace(
        snapshot,
        outcomes={},
        crosschecks={},
        prefix_tokens={},
        prefix_events={},
        checkpoint_rows={},
        result_cache=ResultCacheState(),
    )


class SnapshotCollector(Collector):
    """Render a QueueSnapshot. An empty one declares the metrics without values."""

    def __init__(self) -> None:
        self.snapshot = EMPTY

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily(
            "scorepool_queue_jobs", "Jobs in Redis, by queue and status.", labels=["queue", "state"]
        )
        for queue, counts in self.snapshot.jobs.items():
            for status, count in counts.items():
                jobs.add_metric([queue, status], count)
        yield jobs
        yield _gauge("queue_oldest_seconds", "Seconds that the first job has waited.", "queue", self.snapshot.oldest_s)
        yield _gauge("workers", "Live workers.", "model", self.snapshot.workers)
        yield _gauge(
            "worker_heartbeat_age_seconds", "Age of the oldest heartbeat.", "model", self.snapshot.heartbeat_age_s
        )
        yield _gauge("webhook_deliveries", "Webhook deliveries in Redis.", "state", self.snapshot.deliveries)
        yield _gauge("workers_stopped", "Live workers that a crosscheck has stopped.", "model", self.snapshot.stopped)
        text = "Least version of the weights that a live worker serves."
        yield _gauge("model_weights_version", text, "model", self.snapshot.weights_versions)
        yield from _link_gauges(self.snapshot.links)
        yield from engine_gauges(self.snapshot.engines)
        # Redis keeps these counters for all processes together.
        yield _counter("outcomes", "Jobs that ended, by result or failure.", "code", self.snapshot.outcomes)
        yield _counter(
            "crosschecks",
            "Score jobs that a second worker computed too, and workers that stopped.",
            "outcome",
            self.snapshot.crosschecks,
        )
        yield _counter(
            "prefix_tokens",
            "Given tokens of sequences: those that a shared prefix had computed, and those that were computed.",
            "from",
            self.snapshot.prefix_tokens,
        )
        yield from _prefix_metrics(self.snapshot.prefix_events)
        yield _counter(
            "checkpoint_rows",
            "Finished rows of running jobs: saved in Redis, restored after a death, dropped because the model changed.",
            "event",
            self.snapshot.checkpoint_rows,
        )
        yield from _cache_metrics(self.snapshot.result_cache)


def _prefix_metrics(events: Mapping[tuple[str, str], int]) -> Iterable[Metric]:
    """Render how KV caches of shared prompts were found and dropped, in memory and on the disks."""
    text = "Sequences that looked for the KV cache of a shared prompt, by where and by what they found."
    lookups = CounterMetricFamily("scorepool_prefix_cache_lookups", text, labels=["tier", "outcome"])
    text = "KV caches of shared prompts that were dropped to make room."
    evictions = CounterMetricFamily("scorepool_prefix_cache_evictions", text, labels=["tier"])
    outcomes = {"hits": "hit", "misses": "miss"}
    for (tier, event), number in events.items():
        if event in outcomes:
            lookups.add_metric([tier, outcomes[event]], number)
        else:
            evictions.add_metric([tier], number)
    yield lookups
    yield evictions


def _cache_metrics(cache: ResultCacheState) -> Iterable[Metric]:
    """Render the result cache: counters since they began, and its size now."""
    text = "Sequences that were looked up in the result cache, by what they found: shared is one that runs now."
    yield _counter("result_cache_lookups", text, "outcome", cache.uses)
    if not cache.uses:  # it was not read
        return
    for name, text, number in (
        ("result_cache_evictions", "Entries that the result cache dropped to make room.", cache.evictions),
        ("result_cache_refused", "Entries that were not kept because Redis had too little memory.", cache.refused),
    ):
        yield CounterMetricFamily(f"scorepool_{name}", text, value=number)
    yield GaugeMetricFamily("scorepool_result_cache_entries", "Entries of the result cache.", value=cache.entries)
    yield GaugeMetricFamily("scorepool_result_cache_bytes", "Bytes of the result cache in Redis.", value=cache.bytes)


def _link_gauges(links: Mapping[str, Sequence[wire.WorkerLink]]) -> Iterable[Metric]:
    """Render what workers measure: of a model, the sum of their speeds and the worst of the rest.

    A model of which no worker has a measure yet has no value.
    """

    def measured(
        field: Callable[[wire.WorkerLink], float | None], join: Callable[[Iterable[float]], float]
    ) -> dict[str, float]:
        values = {
            model: [value for link in each if (value := field(link)) is not None] for model, each in links.items()
        }
        return {model: join(found) for model, found in values.items() if found}

    yield _gauge("jobs_per_second", "Jobs that workers end while busy.", "model", measured(lambda w: w.jobs_per_s, sum))
    yield _gauge(
        "tokens_per_second", "Tokens of these jobs, prompts included.", "model", measured(lambda w: w.tokens_per_s, sum)
    )
    yield _gauge(
        "worker_round_trip_seconds",
        "Longest time of a small exchange with Redis.",
        "model",
        measured(lambda w: w.round_trip_s, max),
    )
    yield _gauge("worker_lease_seconds", "Longest lease.", "model", measured(lambda w: w.lease_s, max))
    yield _gauge(
        "worker_drain_seconds",
        "Longest time until a worker has ended its jobs in flight.",
        "model",
        measured(lambda w: w.drain_s, max),
    )


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"scorepool_{name}", text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"scorepool_{name}", text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family


class MetricsMiddleware:
    """Measure replies by the template of their route and a known method, so that no label holds a client's text."""

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
            method = scope["method"] if route != "(none)" and scope["method"] in METHODS else "(any)"
            self._metrics.replies.labels(method, route, status).observe(time.monotonic() - started_at)
