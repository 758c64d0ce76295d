"""Was a promise broken? Asked of Redis and of the logs of driver and receiver alone, when everything is at rest."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from redis import Redis

import wire
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


class Audit:
    """`findings` are the promises broken, by kind; `counts` what was seen."""

    def __init__(self, redis: Redis, driver: Log, receiver: Log) -> None:
        self.findings: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self._redis = redis
        self._accepted: dict[str, bool] = {}  # by id: whether it asked for a webhook
        self._canceled: set[str] = set()
        self._ends: dict[str, tuple[str, str]] = {}  # first read: status, digest
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
                case "cancel":
                    self._canceled.add(entry["id"])
                case "read":
                    self._check_read(entry["id"], entry["status"], entry["digest"])
                case _:
                    self.findings[entry["event"]].append(str(entry))
        self.counts |= Counter(
            accepted=len(self._accepted), read_ended=len(self._ends), asked_to_cancel=len(self._canceled)
        )

    def _check_read(self, id_: str, status: str, digest: str | None) -> None:
        first = self._ends.get(id_)
        if digest is not None:
            self._ends.setdefault(id_, (status, digest))
        if first is not None and first != (status, digest):
            self.findings["changed after it was first readable"].append(f"{id_}: {first} then {status} {digest}")

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
                pipeline.get(wire.Keys.outcome(id_))
                pipeline.xlen(f"rq:results:{id_}")
                pipeline.ttl(f"rq:job:{id_}")
                pipeline.exists(wire.Keys.request(id_))
            answers = iter(pipeline.execute())
        for id_, fields, outcome, num_results, ttl_s, has_request in zip(ids, *[answers] * 5, strict=True):
            texts = [value.decode() if value else "" for value in fields]
            self._check_job(id_, texts, outcome, num_results, ttl_s, bool(has_request))

    def _check_job(
        self, id_: str, fields: list[str], outcome: bytes | None, num_results: int, ttl_s: int, has_request: bool
    ) -> None:
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
        if id_ in self._ends and self._ends[id_][0] != status:
            self.findings["read with another end"].append(f"{id_}: read {self._ends[id_]}, is {status}")
        if webhook and not any(200 <= answer < 300 for _, answer in self._deliveries[wire.Keys.delivery(id_)]):
            self.findings["webhook not delivered"].append(id_)
        if bool(webhook) != self._accepted.get(id_, bool(webhook)):
            self.findings["webhook forgotten"].append(id_)

    def _check_deliveries(self) -> None:
        for id_, posts in self._deliveries.items():
            if len({body for body, _ in posts}) > 1:
                self.findings["one webhook-id, several messages"].append(id_)
            if posts and id_.removeprefix("wh_") not in self._in_redis:
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
        for queue in [*wire.queue_names("demo"), wire.WEBHOOKS]:
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


def _batches(ids: Iterable[str], size: int = 1000) -> Iterator[list[str]]:
    rest = iter(ids)
    while batch := list(islice(rest, size)):
        yield batch
