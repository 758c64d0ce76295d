"""Write to Redis what a worker writes, without RQ's loop, leases or a model."""

import time
from collections.abc import Sequence

from msgspec.structs import replace
from redis import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from scorepool import store, wire
from scorepool.store.scripts import load

PROVENANCE = wire.Provenance(
    model="demo",
    fingerprint="f" * 16,
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu (test)",
    versions={"scorepool": "0"},
)
RESULT = wire.Result(
    sequences=[
        wire.SequenceResult(
            token_ids=[1, 2], token_bytes=[b"a", b"\xff"], text="a\ufffd", logprobs=wire.Floats([None, -0.25])
        )
    ],
    temperature=1.0,
    usage=wire.Usage(prompt_tokens=1, completion_tokens=1),
    stamp=PROVENANCE,
)
COMPLETED = wire.Result(
    sequences=[wire.SequenceResult(token_ids=[2], token_bytes=[b"b"], text="b", finish_reason="stop")],
    temperature=1.0,
    usage=wire.Usage(prompt_tokens=1, completion_tokens=1),
    stamp=PROVENANCE,
)
CLASSIFIED = wire.Result(
    sequences=[],
    labels=["bad", "good"],
    classifications=[
        wire.Classification(
            label="good", logits=wire.Floats([-0.5, 1.5]), probs=wire.Floats([0.125, 0.875]), num_tokens=3
        )
    ],
    temperature=1.0,
    usage=wire.Usage(prompt_tokens=3, completion_tokens=0),
    stamp=PROVENANCE,
)
CANCELED = wire.Failure(code="canceled", message="canceled by its owner")
REGISTRIES = {JobStatus.FINISHED: "finished", JobStatus.FAILED: "failed", JobStatus.STOPPED: "canceled"}


class FakeWorker:
    def __init__(self, redis: Redis, model: str = "demo", name: str = "w1") -> None:
        self.redis = redis
        self.model = model
        self.name = name

    def register(
        self,
        *,
        vocab_size: int = 1000,
        context_length: int = 64,
        fingerprint: str = PROVENANCE.fingerprint,
        aliases: Sequence[str] = (),
        grace_s: int = 0,
        crosscheck: wire.CrosscheckStatus | None = None,
        link: wire.WorkerLink | None = None,
        load: wire.EngineLoad | None = None,
        classifier: wire.Classifier | None = None,
        pooling: wire.Pooling | None = None,
        images: str | None = None,
        adapters: Sequence[wire.ServedAdapter] = (),
    ) -> None:
        """Register as a live worker, and keep the model as a recent one for `grace_s` after `unregister`."""
        card = self.card = wire.ServedModel(
            id=self.model,
            stamp=replace(PROVENANCE, fingerprint=fingerprint),
            context_length=context_length,
            vocab_size=vocab_size,
            self_test="passed",
            worker=self.name,
            aliases=list(aliases),
            created=1_795_000_000,
            tokenizer=wire.TokenizerInfo(bos_token=None, eos_token="</s>", pad_token=None, chat_template=None),
            classifier=classifier,
            pooling=pooling,
            images=images,
            adapters=list(adapters),
            crosscheck=crosscheck,
            link=link,
            load=load,
        )
        self.redis.set(store.Keys.served_model(self.name), wire.encode(card), ex=3600)
        self.redis.zadd(store.Keys.models, {self.name: time.time() + 3600})
        if grace_s:
            self.redis.set(store.Keys.recent_model(self.model), wire.encode(card), ex=grace_s)
            self.redis.zadd(store.Keys.recent_models, {self.model: time.time()})

    def unregister(self) -> None:
        self.redis.delete(store.Keys.served_model(self.name))
        self.redis.zrem(store.Keys.models, self.name)

    def waiting(self) -> set[str]:
        """Return the ids of the jobs that wait in the queues."""
        queues = [self.redis.lrange(f"rq:queue:{name}", 0, -1) for name in store.queue_names(self.model)]
        return {id_.decode() for queue in queues for id_ in queue}

    def job(self, job_id: str) -> Job:
        return Job.fetch(job_id, connection=self.redis, serializer=JSONSerializer)

    def start(self, job_id: str, lease_s: float | None = None) -> wire.Request:
        """Start a job. With `lease_s`, it has a lease that ends after so many seconds."""
        job = self.job(job_id)
        assert job.func_name == store.INFER
        self.redis.lrem(f"rq:queue:{job.origin}", 1, job_id)
        started = {"status": "started", "started_at": utcformat(now()), "worker_name": self.name}
        self.redis.hset(job.key, mapping=started)
        self.redis.zadd(f"rq:wip:{job.origin}", {f"{job_id}:execution": time.time() + 20})
        if lease_s is not None:
            self.redis.zadd(f"rq:executions:{job_id}", {"execution": time.time() + 20})
            self.redis.hset(f"rq:execution:{job_id}:execution", "id", "execution")
            self.redis.pexpire(f"rq:execution:{job_id}:execution", int(lease_s * 1000))
        return wire.decode_request(self.redis.get(store.Keys.request(job_id)))

    def cancel(self, job_id: str) -> None:
        self.end(job_id, CANCELED, JobStatus.STOPPED)

    def fail_delivery(self, job_id: str, reason: str = "HTTP 410") -> None:
        job = self.job(job_id)
        self.redis.lrem(f"rq:queue:{job.origin}", 1, job_id)
        self.redis.hset(job.key, mapping={"status": "failed", "reason": reason})
        self.redis.zadd(f"rq:failed:{job.origin}", {job_id: time.time() + 86_400})

    def stream(self, job_id: str, first: int, *token_ids: int) -> None:
        """Publish generated tokens of a job, from index `first` on, each with the text `a`."""
        delta = wire.TokenDelta(
            id=job_id, sequence=0, first=first, token_ids=[*token_ids], token_bytes=[b"a"] * len(token_ids)
        )
        self.redis.xadd(store.TOKENS, {"step": wire.encode([delta])})

    def end(self, job_id: str, outcome: wire.Outcome = RESULT, status: JobStatus = JobStatus.FINISHED) -> None:
        job = self.job(job_id)
        with self.redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(job.key, mapping={"status": status.value, "ended_at": utcformat(now())})
            pipeline.expire(job.key, 100)
            pipeline.lrem(f"rq:queue:{job.origin}", 1, job_id)
            pipeline.zrem(f"rq:wip:{job.origin}", f"{job_id}:execution")
            pipeline.zadd(f"rq:{REGISTRIES[status]}:{job.origin}", {job_id: time.time() + 86_400})
            if status in (JobStatus.FINISHED, JobStatus.FAILED):
                pipeline.expire(store.Keys.request(job_id), 100)
            else:
                pipeline.delete(store.Keys.request(job_id))
            pipeline.set(store.Keys.outcome(job_id), wire.encode(outcome), ex=100)
            pipeline.xadd(f"rq:results:{job_id}", {"type": "1"})
            pipeline.xadd(store.DONE, {"id": job_id}, maxlen=10_000)
            pipeline.eval(f"{load('outbox.lua')}\nreport_end(ARGV[1], 100)", 0, job_id)
            pipeline.execute()
