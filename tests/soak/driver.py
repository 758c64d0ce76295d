"""Run clients that submit jobs through both APIs, cancel some, and read the jobs repeatedly.

Every 202 and every read is logged. A submission with an Idempotency-Key is repeated until it is answered. A submission
without a key whose answer is lost is given up and not logged, because it was never known to be accepted.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import httpx

from tests.soak.log import Log

WORDS = ["return", "the", "value", "of", "a", "list", "object", "when", "it", "is", "not", "there"]
RETRY_STATUSES = (429, 503)  # and 404 model_not_served while both workers are down
ENDED = ("finished", "failed", "canceled")
TENANTS = ({"Authorization": "Bearer soak-a"}, {"Authorization": "Bearer soak-b"})


def make_job(rng: random.Random, webhook: str, model: str = "demo") -> dict[str, Any]:
    text = " ".join(rng.choices(WORDS, k=8))
    kind = rng.random()
    job: dict[str, Any] = {"model": model, "priority": rng.choice(["high", "normal", "normal", "low"])}
    if kind < 0.5:
        job |= {"type": "score", "items": [{"prompt": text, "completion": " none."}]}
    elif kind < 0.98:
        job |= {"type": "generate", "prompt": text, "max_tokens": rng.choice([1, 4, 12]), "seed": 1}
    else:  # long enough to run through several signals
        job |= {"type": "generate", "prompt": text, "max_tokens": 400, "seed": 1}
    if rng.random() < 0.1:
        job["webhook"] = webhook
    return job


class Driver:
    """Submits `num_jobs` jobs over `duration_s` seconds and reads them until `stop`. A bulk is of one of the models."""

    def __init__(
        self,
        urls: list[str],
        webhook: str,
        log: Log,
        seed: int,
        num_jobs: int,
        duration_s: float,
        models: Sequence[str] = ("demo",),
    ) -> None:
        self._urls = urls
        self._webhook = webhook
        self._log = log
        self._seed = seed
        self._num_jobs = num_jobs
        self._duration_s = duration_s
        self._models = models
        self._lock = threading.Lock()
        self._ids: dict[str, dict[str, str]] = {}  # accepted, oldest first: headers of the tenant by job id
        self._stopping = threading.Event()
        self._submitters = [threading.Thread(target=self._submit, args=(n,)) for n in range(3)]
        self._readers = [threading.Thread(target=self._read, args=(n,)) for n in range(2)]

    def start(self) -> None:
        for thread in (*self._submitters, *self._readers):
            thread.start()

    def join(self) -> None:
        """Wait until every job is submitted. Reading goes on until `stop`."""
        for thread in self._submitters:
            thread.join()

    def stop(self) -> None:
        self._stopping.set()
        for thread in (*self._submitters, *self._readers):
            thread.join()

    def _submit(self, number: int) -> None:
        rng = random.Random(f"{self._seed} submit {number}")
        started_at = time.monotonic()
        tenant = TENANTS[number % len(TENANTS)]
        with httpx.Client(timeout=20.0, trust_env=False, headers=tenant) as http:
            for attempt in count():
                share = len(self._ids) / self._num_jobs
                if share >= 1 or self._stopping.is_set():
                    return
                late_s = time.monotonic() - started_at - share * self._duration_s
                self._stopping.wait(max(0.0, -late_s))
                model = self._models[0] if len(self._models) == 1 else rng.choice(self._models)
                jobs = [make_job(rng, self._webhook, model) for _ in range(rng.choice([1, 1, 20, 100]))]
                jobs = jobs[: max(1, self._num_jobs // 50)]
                key = f"{self._seed}-{number}-{attempt}" if rng.random() < 0.7 else None
                ids = self._submit_until_answered(http, rng, jobs, key)
                if ids is None:
                    continue
                if key and rng.random() < 0.2:
                    repeated = self._submit_until_answered(http, rng, jobs, key)
                    if repeated not in (None, ids):
                        self._log.write("other ids for one key", ids=ids, repeated=repeated)
                if rng.random() < 0.1:
                    self._cancel(http, rng, rng.choice(ids))

    def _submit_until_answered(
        self, http: httpx.Client, rng: random.Random, jobs: list[dict[str, Any]], key: str | None
    ) -> list[str] | None:
        """Return the ids once the jobs are accepted; None if it is unknown whether they are."""
        headers = {"Idempotency-Key": key} if key else {}
        while not self._stopping.is_set():
            try:
                reply = http.post(f"{rng.choice(self._urls)}/v1/jobs/bulk", json=jobs, headers=headers)
            except httpx.TransportError:
                if key is None:
                    return None
            else:
                if reply.status_code == 202:
                    ids = [job["id"] for job in reply.json()]
                    self._record_accepted(ids, jobs, http.headers)
                    return ids
                if reply.status_code not in RETRY_STATUSES and reply.json()["error"]["code"] != "model_not_served":
                    self._log.write("unexpected answer", to="submit", status=reply.status_code, body=reply.text[:300])
                if key is None:
                    return None
            self._stopping.wait(0.3)
        return None

    def _record_accepted(self, ids: list[str], jobs: list[dict[str, Any]], headers: httpx.Headers) -> None:
        tenant = {"Authorization": headers["Authorization"]}
        with self._lock:
            self._ids |= dict.fromkeys(ids, tenant)
        for job_id, job in zip(ids, jobs, strict=True):
            self._log.write("accepted", id=job_id, webhook="webhook" in job, model=job["model"])

    def _cancel(self, http: httpx.Client, rng: random.Random, job_id: str) -> None:
        self._log.write("cancel", id=job_id)  # before sending, because the answer may be lost
        try:
            reply = http.post(f"{rng.choice(self._urls)}/v1/jobs/{job_id}/cancel")
        except httpx.TransportError:
            return
        if reply.status_code not in (200, 202, 409, *RETRY_STATUSES):
            body = reply.text[:300]
            self._log.write("unexpected answer", to="cancel", id=job_id, status=reply.status_code, body=body)

    def _read(self, number: int) -> None:
        rng = random.Random(f"{self._seed} read {number}")
        with httpx.Client(timeout=20.0, trust_env=False) as http:
            while not self._stopping.wait(0.02):
                job_id = self._choose(rng)
                if job_id is None:
                    continue
                try:
                    url, wait = f"{rng.choice(self._urls)}/v1/jobs/{job_id}", {"wait": rng.choice([0, 0, 1])}
                    reply = http.get(url, params=wait, headers=self._ids[job_id])
                except httpx.TransportError:
                    continue
                if reply.status_code == 200:
                    self._record_read(reply.json())
                elif reply.status_code not in RETRY_STATUSES:
                    self._log.write("unexpected answer", to="read", id=job_id, status=reply.status_code)

    def _choose(self, rng: random.Random) -> str | None:
        """Choose an accepted job, in most cases a recent one."""
        with self._lock:
            newest_first = islice(reversed(self._ids), 2000 if rng.random() < 0.9 else None)
            ids = list(newest_first)
        return rng.choice(ids) if ids else None

    def _record_read(self, job: dict[str, Any]) -> None:
        """Log a read of a job, ended or not: the auditor checks that an end is never taken back."""
        final_fields = [job["status"], job["ended_at"], job["result"], job["failure"]]
        digest = hashlib.sha256(json.dumps(final_fields, sort_keys=True).encode()).hexdigest()[:16]
        self._log.write("read", id=job["id"], status=job["status"], digest=digest if job["status"] in ENDED else None)
