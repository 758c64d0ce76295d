"""`scorepool status`: what an API serves and has to do, from /v1/models and /metrics."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from scorepool import wire
from scorepool.commands.connecting import aligned, connect, print_json
from scorepool.commands.jobs import duration
from scorepool.commands.running import FAILED
from scorepool.sdk import Client

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]  # labels and values, by the name of the sample


class QueueStatus(Struct, frozen=True, kw_only=True):
    """Count the jobs of one queue."""

    queue: str
    queued: int
    started: int
    oldest_s: float  # for which its first job has waited


class Status(Struct, frozen=True, kw_only=True):
    """Show an API at one moment."""

    url: str
    redis: Literal["up", "partly", "down"]  # partly: some of several servers do not answer
    workers: list[wire.ServedModel]
    queues: list[QueueStatus]
    ended: dict[str, int]  # jobs since Redis was set up, by `result` or the failure's code

    @property
    def headline(self) -> str:
        """Return the problem, or what else there is to say of all."""
        if self.problem is None and self.redis == "partly":
            return "ready, but some of its Redis servers do not answer: `GET /readyz` says what cannot be used"
        return self.problem or "ready"

    @property
    def problem(self) -> str | None:
        """Return why jobs are not computed, in a sentence; None if they are."""
        if self.redis == "down":
            return "Redis does not answer the API: no job is accepted until it does"
        if not any(worker.takes_jobs for worker in self.workers):
            return "no worker takes jobs: start one with `scorepool worker --model NAME=FOLDER_OR_HUB_ID`"
        return None


def read_status(client: Client) -> Status:
    """Read the status. Raises ScorepoolError, Unreachable, wire.Invalid."""
    samples = parse(client.metrics())
    is_up = any(value for _, value in samples.get("scorepool_redis_up", []))
    jobs: dict[str, dict[str, int]] = {}
    for labels, value in samples.get("scorepool_queue_jobs", []):
        jobs.setdefault(labels["queue"], {})[labels["state"]] = int(value)
    oldest_s = {labels["queue"]: value for labels, value in samples.get("scorepool_queue_oldest_seconds", [])}
    return Status(
        url=client.url,
        redis="up" if is_up else "partly" if jobs else "down",
        workers=sorted(client.models(), key=lambda worker: (worker.id, worker.worker)) if is_up or jobs else [],
        queues=[
            QueueStatus(queue=queue, queued=of["queued"], started=of["started"], oldest_s=oldest_s.get(queue, 0.0))
            for queue, of in sorted(jobs.items())
        ],
        ended={labels["code"]: int(value) for labels, value in samples.get("scorepool_outcomes_total", [])},
    )


def parse(text: str) -> Samples:
    """Parse Prometheus's text format. Raises wire.Invalid."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise wire.Invalid(f"/metrics: {error}") from None
    if "scorepool_redis_up" not in samples:
        raise wire.Invalid("/metrics has no scorepool_redis_up")
    return samples


def status(url: str, api_key: str | None, *, as_json: bool) -> int:
    """Print the status. The exit status is FAILED if no job can be computed."""
    with connect(url, api_key) as client:
        shown = read_status(client)
    if as_json:
        print_json(shown)
    else:
        print("\n".join(_describe(shown)))  # noqa: T201
    return 0 if shown.problem is None else FAILED


def _describe(shown: Status) -> list[str]:
    lines = [f"{shown.url}: {shown.headline}", ""]
    rows = [("QUEUE", "QUEUED", "RUNNING", "OLDEST WAITS")]
    rows += [
        (one.queue, str(one.queued), str(one.started), duration(one.oldest_s) if one.queued else "-")
        for one in shown.queues
    ]
    lines += [aligned(rows), ""]
    workers = [("WORKER", "MODEL", "TOKENS/S", "JOBS/S", "BATCH", "KV", "STATE")]
    workers += [
        (
            one.worker,
            one.id,
            speed(one, "tokens_per_s"),
            speed(one, "jobs_per_s"),
            batch_fill(one),
            kv_fill(one),
            worker_state(one),
        )
        for one in shown.workers
    ]
    lines += [aligned(workers) if shown.workers else "no worker is live"]
    return lines


def speed(worker: wire.ServedModel, field: Literal["tokens_per_s", "jobs_per_s"]) -> str:
    """Return a measured speed of a worker for people; `-` if it has measured none."""
    value = None if worker.link is None else getattr(worker.link, field)
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def batch_fill(worker: wire.ServedModel) -> str:
    """Return the rows of a worker's batch that are in use, `-` if it is of an older release."""
    return "-" if worker.load is None else f"{worker.load.running_rows}/{worker.load.max_running_rows}"


def kv_fill(worker: wire.ServedModel) -> str:
    """Return the share of a worker's memory for KV caches that is in use."""
    return "-" if worker.load is None else f"{worker.load.cached_tokens / worker.load.max_cached_tokens:.1%}"


def worker_state(worker: wire.ServedModel) -> str:
    """Return what hinders a worker, or `ok`."""
    if worker.crosscheck is not None and worker.crosscheck.stopped is not None:
        return f"stopped: {worker.crosscheck.stopped}"
    if worker.self_test != "passed":
        return worker.self_test
    return "ok" if worker.load is None else worker.load.state
