"""Clients: they submit through both APIs, sometimes cancel, and read again and again what they submitted.

Every 202 is logged, and every end that was read. A submission with an Idempotency-Key is repeated until it is answered;
one without is given up when its answer is lost, and is in no log: nobody was promised anything.
"""

import hashlib
import json
import random
import threading
import time
from itertools import islice
from typing import Any

import httpx

from tests.soak.log import Log

WORDS = ["return", "the", "value", "of", "a", "list", "object", "when", "it", "is", "not", "there"]
AGAIN = (429, 503)  # and 404 model_not_served, while both workers are away
ENDED = ("finished", "failed", "canceled")
TENANTS = ({"Authorization": "Bearer soak-a"}, {"Authorization": "Bearer soak-b"})


def request(rng: random.Random, webhook: str) -> dict[str, Any]:
    text = " ".join(rng.choices(WORDS, k=8))
    kind = rng.random()
    job: dict[str, Any] = {"model": "demo", "priority": rng.choice(["high", "normal", "normal", "low"])}
    if kind < 0.5:
        job |= {"type": "score", "items": [{"prompt": text, "completion": " none."}]}
    elif kind < 0.98:
        job |= {"type": "generate", "prompt": text, "max_tokens": rng.choice([1, 4, 12]), "seed": 1}
    else:  # long enough to be met by several signals
        job |= {"type": "generate", "prompt": text, "max_tokens": 400, "seed": 1}
    if rng.random() < 0.1:
        job["webhook"] = webhook
    return job


class Driver:
    """`num_jobs` in all, spread over `duration_s`; `stop` ends it when they are late."""

    def __init__(self, urls: list[str], webhook: str, log: Log, seed: int, num_jobs: int, duration_s: float) -> None:
        self._urls = urls
        self._webhook = webhook
        self._log = log
        self._seed = seed
        self._num_jobs = num_jobs
        self._duration_s = duration_s
        self._lock = threading.Lock()
        self._ids: dict[str, dict[str, str]] = {}  # accepted, oldest first; by id its tenant
        self._submitted = threading.Event()
        self._ended = threading.Event()
        self._submitters = [threading.Thread(target=self._submit, args=(n,)) for n in range(3)]
        self._readers = [threading.Thread(target=self._read, args=(n,)) for n in range(2)]

    def start(self) -> None:
        for thread in (*self._submitters, *self._readers):
            thread.start()

    def join(self) -> None:
        """Until every job was submitted. Reading goes on until `stop`."""
        for thread in self._submitters:
            thread.join()

    def stop(self) -> None:
        self._ended.set()
        for thread in (*self._submitters, *self._readers):
            thread.join()

    def _submit(self, number: int) -> None:
        rng = random.Random(f"{self._seed} submit {number}")
        started_at = time.monotonic()
        tenant = TENANTS[number % len(TENANTS)]
        with httpx.Client(timeout=20.0, trust_env=False, headers=tenant) as http:
            for turn in range(10**9):
                share = len(self._ids) / self._num_jobs
                if share >= 1 or self._ended.is_set():
                    return
                late_s = time.monotonic() - started_at - share * self._duration_s
                self._ended.wait(max(0.0, -late_s))
                jobs = [request(rng, self._webhook) for _ in range(rng.choice([1, 1, 20, 100]))]
                jobs = jobs[: max(1, self._num_jobs // 50)]
                key = f"{self._seed}-{number}-{turn}" if rng.random() < 0.7 else None
                ids = self._until_answered(http, rng, jobs, key)
                if ids is None:
                    continue
                if key and rng.random() < 0.2:
                    again = self._until_answered(http, rng, jobs, key)
                    if again not in (None, ids):
                        self._log.write("other ids for one key", ids=ids, again=again)
                if rng.random() < 0.1:
                    self._cancel(http, rng, rng.choice(ids))

    def _until_answered(
        self, http: httpx.Client, rng: random.Random, jobs: list[dict[str, Any]], key: str | None
    ) -> list[str] | None:
        """The ids, once accepted; None where that is not known."""
        headers = {"Idempotency-Key": key} if key else {}
        while not self._ended.is_set():
            try:
                reply = http.post(f"{rng.choice(self._urls)}/v1/jobs/bulk", json=jobs, headers=headers)
            except httpx.TransportError:
                if key is None:
                    return None
            else:
                if reply.status_code == 202:
                    ids = [job["id"] for job in reply.json()]
                    self._accepted(ids, jobs, http.headers)
                    return ids
                if reply.status_code not in AGAIN and reply.json()["error"]["code"] != "model_not_served":
                    self._log.write("unexpected answer", to="submit", status=reply.status_code, body=reply.text[:300])
                if key is None:
                    return None
            self._ended.wait(0.3)
        return None

    def _accepted(self, ids: list[str], jobs: list[dict[str, Any]], headers: httpx.Headers) -> None:
        tenant = {"Authorization": headers["Authorization"]}
        with self._lock:
            self._ids |= dict.fromkeys(ids, tenant)
        for id_, job in zip(ids, jobs, strict=True):
            self._log.write("accepted", id=id_, webhook="webhook" in job)

    def _cancel(self, http: httpx.Client, rng: random.Random, id_: str) -> None:
        self._log.write("cancel", id=id_)  # before it is sent: the answer may be lost
        try:
            reply = http.post(f"{rng.choice(self._urls)}/v1/jobs/{id_}/cancel")
        except httpx.TransportError:
            return
        if reply.status_code not in (200, 202, 409, *AGAIN):
            self._log.write("unexpected answer", to="cancel", id=id_, status=reply.status_code, body=reply.text[:300])

    def _read(self, number: int) -> None:
        rng = random.Random(f"{self._seed} read {number}")
        with httpx.Client(timeout=20.0, trust_env=False) as http:
            while not self._ended.wait(0.02):
                id_ = self._any(rng)
                if id_ is None:
                    continue
                try:
                    url, wait = f"{rng.choice(self._urls)}/v1/jobs/{id_}", {"wait": rng.choice([0, 0, 1])}
                    reply = http.get(url, params=wait, headers=self._ids[id_])
                except httpx.TransportError:
                    continue
                if reply.status_code == 200:
                    self._saw(reply.json())
                elif reply.status_code not in AGAIN:
                    self._log.write("unexpected answer", to="read", id=id_, status=reply.status_code)

    def _any(self, rng: random.Random) -> str | None:
        """More often a recent one."""
        with self._lock:
            newest_first = islice(reversed(self._ids), 2000 if rng.random() < 0.9 else None)
            ids = list(newest_first)
        return rng.choice(ids) if ids else None

    def _saw(self, job: dict[str, Any]) -> None:
        """Logged also while it has not ended: an end must not be taken back."""
        parts = [job["status"], job["ended_at"], job["result"], job["failure"]]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        self._log.write("read", id=job["id"], status=job["status"], digest=digest if job["status"] in ENDED else None)
