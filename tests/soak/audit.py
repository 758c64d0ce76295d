"""Check every promise about jobs, from Redis and the logs of driver and receiver alone, when all processes are idle.

With `appendfsync everysec` a power cut may lose what was written in the second before it: a job accepted then may be
gone, and a job that ended then may end again with another outcome. Nothing older may be lost or change.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from redis import Redis

from scorepool import store, wire

Entries = Iterable[Mapping[str, Any]]  # of a log
STATUSES = {
    "finished": "finished",
    "failed": "failed",
    "canceled": "canceled",
    "stopped": "canceled",
}  # RQ's to the API's
JOB_ID = r"[0-9a-f]{32}"
# The keys that may exist when all jobs have ended and all workers have stopped. `id` must be the id of a job.
EXPECTED_KEYS = [
    re.compile(pattern)
    for pattern in (
        rf"rq:(?:job|results):(?:wh_)?(?P<id>{JOB_ID})",
        rf"scorepool:(?:outcome|request):(?P<id>{JOB_ID})",
        r"scorepool:(?:owned|deliveries|ledger|sizes|live_batches):.*",
        r"rq:(?:finished|failed|canceled):(?:(?:demo|big)(?::high|:low)?|webhooks)",
        r"rq:queues",
        r"rq:workers(?::.*)?",
        r"scorepool:(?:done|tokens|missing_tokens|id_secret|indexes|models|probe|outcomes)",
    )
]
# Keys of killed workers, and of models and workers of a moment ago; each must have a TTL.
EXPIRING_KEYS = re.compile(
    r"rq:(?:worker|scheduler|scheduler-lock|clean_registries):.*|"
    r"scorepool:(?:card:.*|speeds:.*|batch_turns|waiting:.*|served:.*|recent_models|recent_model:.*|history|history:.*|sessions:.*|weights_workers:.*|weights_moves:.*|prefix_tokens|prefix_events|checkpoints|result_cache.*)"
)


# Seconds before and after a power cut in which a write may be lost: one second and the interval at which cluster.py
# reads the file size before it, replies on their way after it.
POWER_CUT_WINDOW_S = (-1.5, 1.0)


@dataclass(frozen=True, slots=True)
class JobEnd:
    status: str
    digest: str
    at: float


class Audit:
    """The result of a check: `findings` are the broken promises by kind, `counts` what was seen.

    `power_cuts` are the times (unix, s) at which Redis lost what it had not written through.
    """

    def __init__(
        self, redis: Redis, driver: Entries, receiver: Entries, power_cuts: Sequence[float] = (), model: str = "demo"
    ) -> None:
        self.findings: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self._redis = redis
        self._power_cuts = power_cuts
        self._model = model
        self._lost: set[str] = set()  # ids accepted in the second before a power cut, and gone
        self._accepted: dict[str, bool] = {}  # by job id: True if it has a webhook
        self._canceled: set[str] = set()
        self._ends: dict[str, JobEnd] = {}  # by job id: as first read
        self._deliveries: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by webhook-id: body, HTTP status
        self._in_redis = {match["id"] for key in self._scan("rq:job:*") if (match := EXPECTED_KEYS[0].fullmatch(key))}
        self._read_driver(driver)
        self._read_receiver(receiver)
        for job_ids in _batches(sorted(self._in_redis | set(self._accepted))):
            self._check_jobs(job_ids)
        self._check_deliveries()
        self._check_keys()

    def _read_driver(self, log: Entries) -> None:
        for entry in log:
            match entry["event"]:
                case "accepted":
                    self._accepted[entry["id"]] = entry["webhook"]
                    if self._is_near_power_cut(entry["at"]) and entry["id"] not in self._in_redis:
                        self._lost.add(entry["id"])
                case "cancel":
                    self._canceled.add(entry["id"])
                case "read":
                    self._check_read(entry["id"], entry["status"], entry["digest"], entry["at"])
                case "unexpected answer" if entry["status"] == 404 and entry.get("id") in self._lost:
                    self.counts["404 for a job lost by a power cut"] += 1
                case _:
                    self.findings[entry["event"]].append(str(entry))
        self.counts["lost by a power cut"] = len(self._lost)
        self.counts |= Counter(
            accepted=len(self._accepted), read_ended=len(self._ends), asked_to_cancel=len(self._canceled)
        )

    def _is_near_power_cut(self, at: float) -> bool:
        """True if a power cut may have lost what was written at this time."""
        return any(POWER_CUT_WINDOW_S[0] <= at - cut <= POWER_CUT_WINDOW_S[1] for cut in self._power_cuts)

    def _check_read(self, job_id: str, status: str, digest: str | None, at: float) -> None:
        first = self._ends.get(job_id)
        if first is not None and (first.status, first.digest) != (status, digest):
            if self._is_near_power_cut(first.at):
                self.counts["ended again after a power cut"] += 1
                del self._ends[job_id]
            else:
                self.findings["changed after it was first readable"].append(
                    f"{job_id}: {first}, then {status} {digest}"
                )
        if digest is not None:
            self._ends.setdefault(job_id, JobEnd(status, digest, at))

    def _read_receiver(self, log: Entries) -> None:
        for entry in log:
            self._deliveries[entry["id"]].append((entry["body"], entry["status"]))
            if not entry["is_signed"]:
                self.findings["delivery without a valid signature"].append(entry["id"])
        self.counts["deliveries"] = sum(map(len, self._deliveries.values()))

    def _check_jobs(self, job_ids: list[str]) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hmget(
                    f"rq:job:{job_id}",
                    "status",
                    "webhook",
                    store.JobField.MAX_CONCURRENCY,
                    "crashes",
                    "cancel_requested",
                )
                pipeline.get(store.Keys.outcome(job_id))
                pipeline.xlen(f"rq:results:{job_id}")
                pipeline.ttl(f"rq:job:{job_id}")
                pipeline.ttl(store.Keys.request(job_id))
            replies = iter(pipeline.execute())
        for job_id, fields, outcome, num_results, ttl_s, request_ttl_s in zip(job_ids, *[replies] * 5, strict=True):
            texts = [value.decode() if value else "" for value in fields]
            self._check_job(job_id, texts, outcome, num_results, ttl_s, request_ttl_s)

    def _check_job(
        self, job_id: str, fields: list[str], outcome: bytes | None, num_results: int, ttl_s: int, request_ttl_s: int
    ) -> None:
        if job_id in self._lost:
            return
        rq_status, webhook, *leftovers = fields
        status = STATUSES.get(rq_status)
        if status is None or outcome is None:
            self.findings["accepted, but no end"].append(
                f"{job_id}: {rq_status or 'gone'}, outcome {outcome is not None}"
            )
            return
        end = wire.decode_outcome(outcome)
        code = "" if isinstance(end, wire.Result) else end.code
        self.counts[f"{status} {code}".strip()] += 1
        expected = {"": "finished", "canceled": "canceled"}.get(code, "failed")
        if status != expected:
            self.findings["status and outcome differ"].append(f"{job_id}: {status}, {code or 'result'}")
        if expected == "failed" or (
            expected == "canceled" and job_id in self._accepted and job_id not in self._canceled
        ):
            self.findings["failed or canceled without a reason"].append(f"{job_id}: {end}")
        if num_results > 1:
            self.findings["recorded more than once"].append(f"{job_id}: {num_results} results")
        is_request_lost = request_ttl_s == -2 and status == "failed"
        if any(leftovers) or ttl_s <= 0 or request_ttl_s == -1 or is_request_lost:
            self.findings["leftovers of the run"].append(f"{job_id}: {leftovers}, TTLs {ttl_s}, {request_ttl_s}")
        if job_id in self._ends and self._ends[job_id].status != status:
            self.findings["ended otherwise than it was read"].append(
                f"{job_id}: read {self._ends[job_id]}, is {status}"
            )
        if webhook and not any(
            200 <= http_status < 300 for _, http_status in self._deliveries[store.Keys.delivery(job_id)]
        ):
            self.findings["webhook not delivered"].append(job_id)
        if bool(webhook) != self._accepted.get(job_id, bool(webhook)):
            self.findings["webhook forgotten"].append(job_id)

    def _check_deliveries(self) -> None:
        for webhook_id, posts in self._deliveries.items():
            final_bodies = {body for body, _ in posts if not self._is_near_power_cut(_ended_at(body))}
            if len(final_bodies) > 1:
                self.findings["one webhook-id, several messages"].append(webhook_id)
            if final_bodies and webhook_id.removeprefix("wh_") not in self._in_redis:
                self.findings["webhook of an unknown job"].append(webhook_id)
        self.counts["delivered more than once"] = sum(
            sum(200 <= status < 300 for _, status in posts) > 1 for posts in self._deliveries.values()
        )

    def _check_keys(self) -> None:
        for key in self._scan("*"):
            self.counts["keys"] += 1
            match = next((match for pattern in EXPECTED_KEYS if (match := pattern.fullmatch(key))), None)
            if match is not None:
                job_id = match.groupdict().get("id")
                if job_id is not None and job_id not in self._in_redis:
                    self.findings["key of an unknown job"].append(key)
            elif not EXPIRING_KEYS.fullmatch(key) or self._redis.ttl(key) == -1:
                self.findings["key left over"].append(key)
        for queue in [*store.queue_names(self._model), store.WEBHOOKS]:
            for registry in ("finished", "failed", "canceled"):
                self.counts[f"rq:{registry}:{queue}"] = self._redis.zcard(f"rq:{registry}:{queue}")

    def _scan(self, pattern: str) -> Iterator[str]:
        return (key.decode() for key in self._redis.scan_iter(pattern, count=1000))

    def __str__(self) -> str:
        lines = [f"  {count:>8}  {name}" for name, count in sorted(self.counts.items()) if count]
        for kind, messages in self.findings.items():
            lines.append(f"BROKEN: {kind}: {len(messages)}")
            lines += [f"    {message}" for message in messages[:5]]
        return "\n".join([*lines, "AUDIT: clean" if not self.findings else "AUDIT: promises were broken"])


def _ended_at(body: str) -> float:
    """Return when (unix, s) the job of a delivery ended."""
    return datetime.fromisoformat(json.loads(body)["timestamp"]).timestamp()


def _batches(ids: Iterable[str], size: int = 1000) -> Iterator[list[str]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, size)):
        yield batch
