"""Was a promise broken? Asked of Redis and of the logs of driver and receiver alone, when everything is at rest.

With `appendfsync everysec` a power cut may take what was written in the second before: a job accepted then may be gone,
an end recorded then may be another one in the end. Nothing older may.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from redis import Redis

from scorepool import store, wire
from tests.soak.log import Log

WORDS = {"finished": "finished", "failed": "failed", "canceled": "canceled", "stopped": "canceled"}  # RQ's: ours
JOB = r"[0-9a-f]{32}"
# Every key that may be there when all jobs have ended and all workers have gone. `{id}` is checked to be a job's.
KEPT = [
    re.compile(pattern)
    for pattern in (
        rf"rq:(?:job|results):(?:wh_)?(?P<id>{JOB})",
        rf"scorepool:(?:outcome|request):(?P<id>{JOB})",
        r"scorepool:(?:owned|deliveries):.*",
        r"rq:(?:finished|failed|canceled):(?:demo|demo:high|demo:low|webhooks)",
        r"rq:queues",
        r"rq:workers(?::.*)?",
        r"scorepool:(?:done|models|probe|outcomes)",
    )
]
# Of workers that were killed: these pass by themselves.
PASSING = re.compile(r"rq:(?:worker|scheduler|scheduler-lock|clean_registries):.*|scorepool:card:.*")


# Around a power cut: the second that is lost, between two looks at the file (cluster.py), and answers under way.
CUT_S = (-1.5, 1.0)


@dataclass(frozen=True, slots=True)
class End:
    status: str
    digest: str
    at: float


class Audit:
    """`findings` are the promises broken, by kind; `counts` what was seen. `power_cuts`: when (unix, s) Redis lost what
    it had not written through."""

    def __init__(self, redis: Redis, driver: Log, receiver: Log, power_cuts: Sequence[float] = ()) -> None:
        self.findings: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self._redis = redis
        self._power_cuts = power_cuts
        self._lost: set[str] = set()  # accepted in the second before a power cut, and gone
        self._accepted: dict[str, bool] = {}  # by id: whether it asked for a webhook
        self._canceled: set[str] = set()
        self._ends: dict[str, End] = {}  # as it was first read
        self._deliveries: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by webhook-id: body, status
        self._in_redis = {match["id"] for key in self._scan("rq:job:*") if (match := KEPT[0].fullmatch(key))}
        self._read_driver(driver)
        self._read_receiver(receiver)
        for ids in _batches(sorted(self._in_redis | set(self._accepted))):
            self._check_jobs(ids)
        self._check_deliveries()
        self._check_keys()

    def _read_driver(self, log: Log) -> None:
        for entry in log:
            match entry["event"]:
                case "accepted":
                    self._accepted[entry["id"]] = entry["webhook"]
                    if self._is_lost(entry["at"]) and entry["id"] not in self._in_redis:
                        self._lost.add(entry["id"])
                case "cancel":
                    self._canceled.add(entry["id"])
                case "read":
                    self._check_read(entry["id"], entry["status"], entry["digest"], entry["at"])
                case "unexpected answer" if entry["status"] == 404 and entry.get("id") in self._lost:
                    self.counts["404 for what a power cut took"] += 1
                case _:
                    self.findings[entry["event"]].append(str(entry))
        self.counts["lost by a power cut"] = len(self._lost)
        self.counts |= Counter(
            accepted=len(self._accepted), read_ended=len(self._ends), asked_to_cancel=len(self._canceled)
        )

    def _is_lost(self, at: float) -> bool:
        """Whether a power cut may have taken what was written then."""
        return any(CUT_S[0] <= at - cut <= CUT_S[1] for cut in self._power_cuts)

    def _check_read(self, id_: str, status: str, digest: str | None, at: float) -> None:
        first = self._ends.get(id_)
        if first is not None and (first.status, first.digest) != (status, digest):
            if self._is_lost(first.at):
                self.counts["ended anew after a power cut"] += 1
                del self._ends[id_]
            else:
                self.findings["changed after it was first readable"].append(f"{id_}: {first}, then {status} {digest}")
        if digest is not None:
            self._ends.setdefault(id_, End(status, digest, at))

    def _read_receiver(self, log: Log) -> None:
        for entry in log:
            self._deliveries[entry["id"]].append((entry["body"], entry["status"]))
            if not entry["is_signed"]:
                self.findings["delivery without a valid signature"].append(entry["id"])
        self.counts["deliveries"] = sum(map(len, self._deliveries.values()))

    def _check_jobs(self, ids: list[str]) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for id_ in ids:
                pipeline.hmget(f"rq:job:{id_}", "status", "webhook", "company", "crashes", "cancel_requested")
                pipeline.get(store.Keys.outcome(id_))
                pipeline.xlen(f"rq:results:{id_}")
                pipeline.ttl(f"rq:job:{id_}")
                pipeline.exists(store.Keys.request(id_))
            answers = iter(pipeline.execute())
        for id_, fields, outcome, num_results, ttl_s, has_request in zip(ids, *[answers] * 5, strict=True):
            texts = [value.decode() if value else "" for value in fields]
            self._check_job(id_, texts, outcome, num_results, ttl_s, bool(has_request))

    def _check_job(
        self, id_: str, fields: list[str], outcome: bytes | None, num_results: int, ttl_s: int, has_request: bool
    ) -> None:
        if id_ in self._lost:
            return
        rq_status, webhook, *marks = fields
        status = WORDS.get(rq_status)
        if status is None or outcome is None:
            self.findings["accepted, but no end"].append(f"{id_}: {rq_status or 'gone'}, outcome {outcome is not None}")
            return
        end = wire.decode_outcome(outcome)
        code = "" if isinstance(end, wire.Result) else end.code
        self.counts[f"{status} {code}".strip()] += 1
        expected = {"": "finished", "canceled": "canceled"}.get(code, "failed")
        if status != expected:
            self.findings["status and outcome differ"].append(f"{id_}: {status}, {code or 'result'}")
        if expected == "failed" or (expected == "canceled" and id_ in self._accepted and id_ not in self._canceled):
            self.findings["an end that nobody asked for"].append(f"{id_}: {end}")
        if num_results > 1:
            self.findings["recorded more than once"].append(f"{id_}: {num_results} results")
        if any(marks) or ttl_s <= 0 or has_request != (status == "failed"):
            self.findings["traces of the way"].append(f"{id_}: {marks}, ttl {ttl_s}, request {has_request}")
        if id_ in self._ends and self._ends[id_].status != status:
            self.findings["read with another end"].append(f"{id_}: read {self._ends[id_]}, is {status}")
        if webhook and not any(200 <= answer < 300 for _, answer in self._deliveries[store.Keys.delivery(id_)]):
            self.findings["webhook not delivered"].append(id_)
        if bool(webhook) != self._accepted.get(id_, bool(webhook)):
            self.findings["webhook forgotten"].append(id_)

    def _check_deliveries(self) -> None:
        for id_, posts in self._deliveries.items():
            standing = {body for body, _ in posts if not self._is_lost(_ended_at(body))}
            if len(standing) > 1:
                self.findings["one webhook-id, several messages"].append(id_)
            if standing and id_.removeprefix("wh_") not in self._in_redis:
                self.findings["webhook of no job"].append(id_)
        self.counts["delivered more than once"] = sum(
            sum(200 <= status < 300 for _, status in posts) > 1 for posts in self._deliveries.values()
        )

    def _check_keys(self) -> None:
        for key in self._scan("*"):
            self.counts["keys"] += 1
            match = next((match for pattern in KEPT if (match := pattern.fullmatch(key))), None)
            if match is not None:
                id_ = match.groupdict().get("id")
                if id_ is not None and id_ not in self._in_redis:
                    self.findings["key of no job"].append(key)
            elif not PASSING.fullmatch(key) or self._redis.ttl(key) == -1:
                self.findings["key left over"].append(key)
        for queue in [*store.queue_names("demo"), store.WEBHOOKS]:
            for registry in ("finished", "failed", "canceled"):
                self.counts[f"rq:{registry}:{queue}"] = self._redis.zcard(f"rq:{registry}:{queue}")

    def _scan(self, pattern: str) -> Iterator[str]:
        return (key.decode() for key in self._redis.scan_iter(pattern, count=1000))

    def __str__(self) -> str:
        lines = [f"  {count:>8}  {what}" for what, count in sorted(self.counts.items()) if count]
        for kind, found in self.findings.items():
            lines.append(f"BROKEN: {kind}: {len(found)}")
            lines += [f"    {one}" for one in found[:5]]
        return "\n".join([*lines, "AUDIT: clean" if not self.findings else "AUDIT: promises were broken"])


def _ended_at(body: str) -> float:
    """Unix, s: the end that a delivery tells of."""
    return datetime.fromisoformat(json.loads(body)["timestamp"]).timestamp()


def _batches(ids: Iterable[str], size: int = 1000) -> Iterator[list[str]]:
    rest = iter(ids)
    while batch := list(islice(rest, size)):
        yield batch
