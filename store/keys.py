"""Every key of our own that a process reads or writes in Redis. Those of RQ are in rq_keys.py.

No other module contains the name of a key.

Each of our keys begins with SCOREPOOL_REDIS_PREFIX (default `scorepool`). With another prefix P

    our keys            P:models, P:request:<id>, ...
    RQ's job hashes     rq:job:P:<id>          (RQ lets the prefix of jobs be set)
    RQ's queues         rq:queue:P::<model>    (RQ's other keys are fixed, and nearly all of them end in a queue's name)

so that two deployments can share a database. RQ lets no other key be renamed: `rq:workers`, `rq:worker:<name>`,
`rq:queues` and `rq:suspended` are shared. A model's name has no colon, so `P::<model>` is no queue of another
deployment.

To rename a key, change it here: scripts get the names as constants (lua_constants.py).
"""

import os

DEFAULT_PREFIX = "scorepool"
PREFIX = os.environ.get("SCOREPOOL_REDIS_PREFIX", DEFAULT_PREFIX)  # every process checks it with Settings.load
QUEUE_PREFIX = "" if PREFIX == DEFAULT_PREFIX else f"{PREFIX}::"

INFER = "worker.infer"  # the job function that runs one wire.Request on the engine
DELIVER = "worker.webhook.deliver"  # the job function that sends one event to one receiver
WEBHOOKS_NAME = "webhooks"
WEBHOOKS = f"{QUEUE_PREFIX}{WEBHOOKS_NAME}"  # the queue of webhook deliveries
TOKENS = f"{PREFIX}:tokens"  # stream: one entry {step} per write of a worker with streaming requests; not persisted
DONE = f"{PREFIX}:done"  # stream: one entry {id} per job that ended
LIST_LENGTH = 64  # jobs in RQ's list of a queue that owners share; the rest is in their backlogs (lua/backlog.lua)
MEMORY_FOR_NEW = 80  # percent of Redis's maxmemory, above which no jobs and files are accepted (lua/memory.lua)
MEMORY_FOR_CLAIMS = 90  # percent, above which no job begins; the rest is for the results of jobs in flight
FILE_ID, BATCH_ID = "file-", "batch_"  # first parts of ids
JOB_BYTES = 2048  # about, of a job beside its request and its outcome
DELIVERY_BYTES = 2048  # about, of a delivery
FILE_BYTES = 1024  # about, of a file beside its chunks
BATCH_BYTES = 4096  # about, of a batch beside its lines
DELIVERY_KEPT_S = 14 * 86_400  # a delivery that was given up, so that it can be replayed

LATENCY_MS = "latency_ms"  # a field of Keys.outcome_counts


class Keys:
    """Our own keys."""

    reset_prefix_cache = f"{PREFIX}:reset_prefix_cache"  # channel: all workers drop the KV caches of shared prompts
    models = f"{PREFIX}:models"  # zset: worker names by the time (unix, s) at which their ServedModel expires
    outcome_counts = f"{PREFIX}:outcomes"  # hash: how many jobs ended, by `result` or the failure's code; permanent.
    # LATENCY_MS has the sum of the times from submission to result.
    batches = f"{PREFIX}:batches"  # zset: batches that have not ended, by the time (unix, s) of their next turn
    batch_turns = (
        f"{PREFIX}:batch_turns"  # hash: drivers' time that each owner's batches have had, s (lua/claim_batch.lua)
    )
    paused = f"{PREFIX}:paused"  # string: since when (unix, s) `POST /pause` holds; without it, nothing is paused
    probe = f"{PREFIX}:probe"  # string: written to see whether Redis takes writes
    sweep_schedule = (
        f"{PREFIX}:indexes"  # zset: keys of jobs_of and deliveries_of by the time (unix, s) of their next sweep
    )
    missing_tokens = f"{PREFIX}:missing_tokens"  # set: wire.MissingTokens that a worker shall write again; expires
    crosscheck_counts = f"{PREFIX}:crosschecks"  # hash: how many crosschecks there were, by outcome
    prefix_tokens = f"{PREFIX}:prefix_tokens"  # hash: given tokens of all sequences, by `cache` or `computed`; expires
    prefix_events = f"{PREFIX}:prefix_events"  # hash: `memory:hits`, ..., `disk:evictions` of all workers; expires
    id_secret = (
        f"{PREFIX}:id_secret"  # string: from which ids that follow from an Idempotency-Key are computed; permanent
    )
    unserved = f"{PREFIX}:unserved"  # zset: queues that nobody serves, by their next check, see lua/unserved.lua
    recent_models = f"{PREFIX}:recent_models"  # zset: models by the time (unix, s) at which they were last served

    result_cache = f"{PREFIX}:cache"  # hash: wire.CachedSequence by digest, and `bytes` of them all; expires
    result_cache_uses = f"{PREFIX}:cache:uses"  # zset: the digests by the time (unix, s) of their last use; expires
    result_cache_counts = f"{PREFIX}:cache:counts"  # hash: hits, misses, shared, evictions, refused; expires

    checkpoint_counts = f"{PREFIX}:checkpoints"  # hash: rows that were saved, restored, dropped; expires

    stored_results = f"{PREFIX}:stored_results"  # zset: keys of the leases under which results were written to the
    # result store, by the time (unix, s) of their next check, see lua/check_stored.lua

    history = f"{PREFIX}:history"  # list: the points of the last hour, see api/metrics/history.py; expires

    @staticmethod
    def history_slot(at: int) -> str:
        """string: the point of this time (unix, s) was written; expires."""
        return f"{PREFIX}:history:{at}"

    @staticmethod
    def ledger_of(owner: str) -> str:
        """zset: ids of what an owner has in Redis, by the time (unix, s) of the next check, see lua/ledger.lua."""
        return f"{PREFIX}:ledger:{owner}"

    @staticmethod
    def sizes_of(owner: str) -> str:
        """hash: the bytes of each id in the owner's ledger, and `total`."""
        return f"{PREFIX}:sizes:{owner}"

    @staticmethod
    def unserved_of(owner: str) -> str:
        """set: queues of models that an owner waits for and that no worker served when it submitted jobs for them."""
        return f"{PREFIX}:unserved:{owner}"

    @staticmethod
    def adapters(model: str) -> str:
        """hash: wire.AdapterRecord by name, of adapters that were loaded or unloaded at run time; permanent."""
        return f"{PREFIX}:adapters:{model}"

    @staticmethod
    def adapter_reports(model: str) -> str:
        """hash: wire.AdapterReport by `serial:worker`, of adapters that are being loaded; expires."""
        return f"{PREFIX}:adapter_reports:{model}"

    @staticmethod
    def adapters_lock(model: str) -> str:
        """string: there while an adapter of the model is being loaded or unloaded; expires."""
        return f"{PREFIX}:adapters_lock:{model}"

    @staticmethod
    def recent_model(model: str) -> str:
        """string: the last ServedModel, kept for SCOREPOOL_MODEL_GRACE_S after the model's last worker has gone."""
        return f"{PREFIX}:recent_model:{model}"

    @staticmethod
    def crosscheck_inbox(worker: str) -> str:
        """list: wire.CrosscheckMessages that wait for a worker."""
        return f"{PREFIX}:crosscheck:{worker}"

    @staticmethod
    def weights(model: str) -> str:
        """hash: the versions of a model's weights, see store/weights.py; permanent."""
        return f"{PREFIX}:weights:{model}"

    @staticmethod
    def weights_workers(model: str) -> str:
        """zset: workers that a version must be loaded by, by the time (unix, s) at which their registration expires."""
        return f"{PREFIX}:weights_workers:{model}"

    @staticmethod
    def weights_moves(model: str) -> str:
        """hash: `<version> <unix time>` by worker: what it serves, and since when."""
        return f"{PREFIX}:weights_moves:{model}"

    @staticmethod
    def weights_changed(model: str) -> str:
        """channel: versions that became pending, committed or failed."""
        return f"{PREFIX}:weights_changed:{model}"

    @staticmethod
    def weights_upload(upload_id: str) -> str:
        """hash: chunks of weights that were sent, by their number; expires until their version is pending."""
        return f"{PREFIX}:weights_upload:{upload_id}"

    @staticmethod
    def request(job_id: str) -> str:
        """string: the job's wire.Request."""
        return f"{PREFIX}:request:{job_id}"

    @staticmethod
    def response(job_id: str) -> str:
        """string: the body of the job's request in another server's dialect, if its answer can be asked for again."""
        return f"{PREFIX}:response:{job_id}"

    @staticmethod
    def outcome(job_id: str) -> str:
        """string: the job's wire.Outcome."""
        return f"{PREFIX}:outcome:{job_id}"

    @staticmethod
    def checkpoint(job_id: str) -> str:
        """hash: finished rows of a job that runs, in chunks by number, see lua/save_checkpoint.lua; expires."""
        return f"{PREFIX}:checkpoint:{job_id}"

    @staticmethod
    def outcome_upload(lease_key: str) -> str:
        """string: the first bytes of an outcome that a worker sends in parts; expires when no part comes any more."""
        return f"{PREFIX}:outcome_upload:{lease_key}"

    @staticmethod
    def delivery(job_id: str) -> str:
        """The id of the RQ job that delivers this job's own webhook; also the `webhook-id`, constant over retries."""
        return f"wh_{job_id}"

    @staticmethod
    def endpoints_of(owner: str) -> str:
        """hash: an owner's webhook endpoints, id: wire.Subscriber in JSON."""
        return f"{PREFIX}:endpoints:{owner}"

    @staticmethod
    def webhook_secret(owner: str) -> str:
        """string: the wire.SecretRotation of an owner, in JSON; absent before the first rotation."""
        return f"{PREFIX}:webhook_secret:{owner}"

    @staticmethod
    def events_asked_for(owner: str) -> str:
        """string: how many tests and replays an owner has asked for within a minute; expires then."""
        return f"{PREFIX}:events_asked_for:{owner}"

    @staticmethod
    def deliveries_of(owner: str) -> str:
        """zset: ids of an owner's deliveries by time of creation (unix, s)."""
        return f"{PREFIX}:deliveries:{owner}"

    @staticmethod
    def batch(batch_id: str) -> str:
        """hash: owner, state, cancel, turn (api/repositories/batches.py)."""
        return f"{PREFIX}:batch:{batch_id}"

    @staticmethod
    def batch_lines(batch_id: str) -> str:
        """hash: the lines of a batch that have jobs, `<line>.<number of jobs>`: the line."""
        return f"{PREFIX}:batch:{batch_id}:lines"

    @staticmethod
    def batches_of(owner: str) -> str:
        """zset: ids of an owner's batches by time of creation (unix, s)."""
        return f"{PREFIX}:batches:{owner}"

    @staticmethod
    def live_batches_of(owner: str) -> str:
        """set: ids of an owner's batches that have not ended."""
        return f"{PREFIX}:live_batches:{owner}"

    @staticmethod
    def file(file_id: str) -> str:
        """hash: owner, file, and a `batch:<id>` for each batch that has yet to read it."""
        return f"{PREFIX}:file:{file_id}"

    @staticmethod
    def file_parts(file_id: str) -> str:
        """hash: whole lines of a file, zlib, by number from 0; in output files, also the `chunk_end` of each."""
        return f"{PREFIX}:file:{file_id}:parts"

    @staticmethod
    def chunk_end(number: int) -> str:
        """Field of `file_parts`: the lines and bytes of a file up to the end of a chunk."""
        return f"end:{number}"

    @staticmethod
    def file_reader(batch_id: str) -> str:
        """Field of `file`: a batch that has yet to read it."""
        return f"batch:{batch_id}"

    @staticmethod
    def files_of(owner: str) -> str:
        """zset: ids of an owner's files by time of creation (unix, s)."""
        return f"{PREFIX}:files:{owner}"

    @staticmethod
    def sessions_of(owner: str) -> str:
        """hash: who is logged in to the page with a key of an owner, see api/repositories/sessions.py."""
        return f"{PREFIX}:sessions:{owner}"

    @staticmethod
    def jobs_of(owner: str) -> str:
        """zset: ids of an owner's jobs by time of submission (unix, s)."""
        return f"{PREFIX}:owned:{owner}"

    @staticmethod
    def backlog(queue: str, owner: str) -> str:
        """list: ids of the owner's jobs that wait behind RQ's list of the queue, see store/lua/backlog.lua."""
        return f"{PREFIX}:backlog:{queue}:{owner}"

    @staticmethod
    def fair_share(queue: str) -> str:
        """zset: the owners that have a backlog, by their fair-share clock: jobs served / weight."""
        return f"{PREFIX}:turns:{queue}"

    @staticmethod
    def served(queue: str) -> str:
        """hash: how much each owner was served by the workers whose first queue this is, see lua/owner_turns.lua."""
        return f"{PREFIX}:served:{queue}"

    @staticmethod
    def served_model(worker: str) -> str:
        """string: the wire.ServedModel of a worker; expires with it."""
        return f"{PREFIX}:card:{worker}"

    @staticmethod
    def wakeup(queue: str) -> str:
        """Channel: a message wakes all workers of the queue. Our scripts wake single ones (store/lua/wake.lua)."""
        return f"{PREFIX}:bell:{queue}"

    @staticmethod
    def wake(worker: str) -> str:
        """Channel: an empty message wakes the worker; another brings a job or takes one away (claims/messages.py)."""
        return f"{PREFIX}:wake:{worker}"

    @staticmethod
    def waiting_workers(queue: str) -> str:
        """zset: workers that wait for jobs of the queue, by their speed, see store/lua/wake.lua."""
        return f"{PREFIX}:waiting:{queue}"

    @staticmethod
    def speed_totals(queue: str) -> str:
        """string: the number of workers of the queue, and their speeds together; expires, see store/lua/speeds.lua."""
        return f"{PREFIX}:speed_totals:{queue}"

    @staticmethod
    def nothing_unbegun(queue: str) -> str:
        """string: no worker of the queue had a job that it has not begun; expires, see store/lua/claim.lua."""
        return f"{PREFIX}:nothing_unbegun:{queue}"

    @staticmethod
    def draining_worker(queue: str) -> str:
        """string: the worker that lets its jobs end to run a suspect of the queue; expires, see store/lua/claim.lua."""
        return f"{PREFIX}:draining_worker:{queue}"

    @staticmethod
    def speeds(queue: str) -> str:
        """hash: how fast the workers of the queue are, see store/lua/speeds.lua."""
        return f"{PREFIX}:speeds:{queue}"
