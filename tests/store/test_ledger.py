"""What the ledger of an owner adds up to is what a recount finds, whatever happens to jobs and files."""

import asyncio
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq.queue import Queue as RqQueue

from scorepool import store, wire
from scorepool.api.http.errors import ApiError
from scorepool.api.repositories.files import Files
from scorepool.api.repositories.queue import Queue, new_job_ids
from scorepool.api.repositories.quota import MAX_CONTEXT, Quota, job_bytes
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.store.scripts import load
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases
from scorepool.worker.rq.sweep import Sweep
from tests.api.conftest import SECRET

OWNER = "alice"
SETTINGS = store.Settings(webhook_secret=SECRET)
FAILURE = wire.encode(wire.Failure(code="numeric", message="NaN"))
OPERATIONS = (
    *("submit", "submit_again", "finish", "finish_twice", "fail", "requeue", "cancel", "delete", "expire", "kill"),
    *("delete_by_hand", "upload", "delete_file", "expire_file", "sweep"),
)


class Upload:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data


class Owner:
    """Do what an owner, workers, time and other tools do to the owner's jobs and files."""

    def __init__(self, redis: Redis, redis_url: str, runner: asyncio.Runner) -> None:
        self.redis = redis
        self.runner = runner
        self.connection = AsyncRedis.from_url(redis_url)
        self.queue = Queue(self.connection, SETTINGS, lambda _: 1, has_several_owners=True)
        self.files = Files(self.connection, SETTINGS, Quota.load(SETTINGS, has_several_owners=True))
        registration = wire.EndpointRegistration(url="https://hooks.example/")
        runner.run(WebhookEndpoints(self.connection, SETTINGS).register(OWNER, registration))
        self.rq_queue = RqQueue("demo", connection=redis)
        self.leases = Leases(redis, "w1", store.RqKeys.worker("w1"), 20.0)
        self.reserved: dict[str, int] = {}
        self.requests: dict[str, wire.Request] = {}
        self.file_ids: list[str] = []

    # One method for each of OPERATIONS; `pick` chooses among jobs or files, and sizes.

    def submit(self, pick: int) -> None:
        [job_id] = new_job_ids(1)
        request = wire.Generate(model="demo", prompt="a" * pick, max_tokens=pick, webhook="https://a.example/")
        self.runner.run(self.queue.submit(OWNER, [request], [job_id]))
        self.requests[job_id] = request
        self.reserved[job_id] = job_bytes(request, wire.encode(request), MAX_CONTEXT, is_of_batch=False)
        self.reserved[job_id] += store.DELIVERY_BYTES  # to the endpoint

    def submit_again(self, pick: int) -> None:
        if job_id := self._job(pick):
            self.runner.run(self.queue.submit(OWNER, [self.requests[job_id]], [job_id]))
            self.reserved.setdefault(job_id, 0)

    def finish(self, pick: int, times: int = 1) -> None:
        for job in self._claim():
            details: list[Any] = [job.lease_key, 0, b"x" * pick, 100, 0.1, 2, "ended_at", "now", 2, "type", "1"]
            for _ in range(times):
                self.redis.register_script(load("finish.lua"))(
                    keys=[store.RqKeys.registry("wip", "demo")], args=["rq:worker:w1", "idle", "", *details]
                )

    def finish_twice(self, pick: int) -> None:
        self.finish(pick, times=2)

    def fail(self, pick: int) -> None:
        for job in self._claim():
            self.redis.hset(store.RqKeys.job(job.job_id), "status", "failed")
            self.redis.zrem(store.RqKeys.registry("wip", "demo"), job.lease_key)
            self.redis.expire(store.RqKeys.job(job.job_id), 100)
            self.redis.eval(load("record_outcome.lua"), 0, job.job_id, FAILURE, 100, 1, "")

    def requeue(self, pick: int) -> None:
        """Do what `rq requeue` does."""
        for job_id in self._jobs("failed")[:1]:
            self.redis.hset(store.RqKeys.job(job_id), "status", "queued")
            self.redis.rpush(store.RqKeys.queue("demo"), job_id)
            self.redis.persist(store.RqKeys.job(job_id))

    def cancel(self, pick: int) -> None:
        self._try(self.queue.cancel, pick)

    def delete(self, pick: int) -> None:
        self._try(self.queue.delete, pick)

    def expire(self, pick: int) -> None:
        for job_id in self._jobs("finished", "failed", "canceled")[:1]:
            self.redis.delete(store.RqKeys.job(job_id), store.Keys.outcome(job_id), store.Keys.request(job_id))

    def delete_by_hand(self, pick: int) -> None:
        """Delete a job with a tool that knows nothing of ledgers."""
        if job_id := self._job(pick):
            self.redis.delete(store.RqKeys.job(job_id), store.Keys.outcome(job_id), store.Keys.request(job_id))

    def kill(self, pick: int) -> None:
        """Let a worker that has claimed a job die."""
        for job in self._claim():
            self.redis.delete(store.RqKeys.execution(job.lease_key))
            self.leases.reclaim([self.rq_queue], 5)

    def upload(self, pick: int) -> None:
        file_id = f"file-{new_job_ids(1)[0]}"
        self.runner.run(self.files.save(OWNER, file_id, "f", Upload(b"{}\n" * (pick - 1)), 3600))
        self.file_ids.append(file_id)

    def delete_file(self, pick: int) -> None:
        if self.file_ids:
            self.runner.run(self.files.delete(OWNER, self.file_ids.pop(pick % len(self.file_ids))))

    def expire_file(self, pick: int) -> None:
        if self.file_ids:
            file_id = self.file_ids.pop(pick % len(self.file_ids))
            self.redis.delete(store.Keys.file(file_id), store.Keys.file_parts(file_id))

    def sweep(self, pick: int) -> None:
        self.redis.zadd(store.Keys.sweep_schedule, {store.Keys.jobs_of(OWNER): 0}, xx=True)
        Sweep(self.redis, ["demo"], 60).run()

    # What is counted.

    def total(self) -> int:
        return int(self.redis.hget(store.Keys.sizes_of(OWNER), "total") or 0)

    def sizes(self) -> dict[str, int]:
        sizes = self.redis.hgetall(store.Keys.sizes_of(OWNER))
        return {name.decode(): int(size) for name, size in sizes.items() if name != b"total"}

    def recount(self) -> int:
        jobs = sum(map(self._job_bytes, self.reserved))
        deliveries = len(list(self.redis.scan_iter(store.RqKeys.job("wh_*")))) * store.DELIVERY_BYTES
        parts = [self.redis.hvals(store.Keys.file_parts(file_id)) for file_id in self.file_ids]
        return jobs + deliveries + sum(store.FILE_BYTES + sum(map(len, chunks)) for chunks in parts)

    def settle(self) -> None:
        """Let every entry be due, and sweep."""
        entries = self.redis.zrange(store.Keys.ledger_of(OWNER), 0, -1)
        if entries:
            self.redis.zadd(store.Keys.ledger_of(OWNER), dict.fromkeys(entries, 0))
        self.sweep(0)

    def _job_bytes(self, job_id: str) -> int:
        status = self.redis.hget(store.RqKeys.job(job_id), "status")
        outcome = self.redis.strlen(store.Keys.outcome(job_id))
        if status is None:
            return 0
        has_ended = self.redis.hexists(store.RqKeys.job(job_id), store.JobField.NUM_ENDS)
        if status in (b"finished", b"failed", b"canceled"):
            return store.JOB_BYTES + outcome + self.redis.strlen(store.Keys.request(job_id))
        if has_ended:  # it was queued again by hand: its entry is that of its end
            return self.sizes()[job_id]
        return self.reserved[job_id]

    def _claim(self) -> list[ClaimedJob]:
        return self.leases.claim([self.rq_queue], Claim(max_jobs=1, num_in_flight=0, max_in_flight=8)).jobs

    def _job(self, pick: int) -> str | None:
        ids = list(self.reserved)
        return ids[pick % len(ids)] if ids else None

    def _jobs(self, *statuses: str) -> list[str]:
        found = {job_id: self.redis.hget(store.RqKeys.job(job_id), "status") for job_id in self.reserved}
        return [job_id for job_id, status in found.items() if status and status.decode() in statuses]

    def _try(self, act: Any, pick: int) -> None:
        if job_id := self._job(pick):
            try:
                self.runner.run(act(OWNER, job_id))
            except ApiError:
                return


@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 300)), min_size=5, max_size=40))
def test_the_ledger_is_what_a_recount_finds(redis: Redis, redis_url: str, operations: list[tuple[str, int]]):
    redis.flushdb()
    with asyncio.Runner() as runner:
        owner = Owner(redis, redis_url, runner)
        for name, pick in operations:
            getattr(owner, name)(pick)
            assert owner.total() == sum(owner.sizes().values()), name
        owner.settle()
        assert owner.total() == sum(owner.sizes().values()) == owner.recount()
        assert redis.zcard(store.Keys.ledger_of(OWNER)) == len(owner.sizes())
        redis.delete(*redis.scan_iter("rq:job:*"), *redis.scan_iter("scorepool:file:*"), "none")
        owner.settle()
        assert not redis.exists(store.Keys.ledger_of(OWNER), store.Keys.sizes_of(OWNER))
        runner.run(owner.connection.aclose())
