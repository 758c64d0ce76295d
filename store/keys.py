"""Every key that a process of ours reads or writes in Redis: our own (`Keys`) and RQ's (`RqKeys`).

No other module contains the name of a key.

Each of our keys begins with SCOREPOOL_REDIS_PREFIX (default `scorepool`). With another prefix P

    our keys            P:models, P:request:<id>, ...
    RQ's job hashes     rq:job:P:<id>          (RQ lets the prefix of jobs be set)
    RQ's queues         rq:queue:P::<model>    (RQ's other keys are fixed, and nearly all of them end in a queue's name)

so that two deployments can share a database. RQ lets no other key be renamed: `rq:workers`, `rq:worker:<name>`,
`rq:queues` and `rq:suspended` are shared. A model's name has no colon, so `P::<model>` is no queue of another
deployment.

To rename a key, change it here: Lua gets the names as constants (LUA_CONSTANTS, see scripts.py).
"""

import os
from typing import get_args

from scorepool.wire.request_fields import Priority
from scorepool.wire.stored_result import MAX_RECORD_BYTES

DEFAULT_PREFIX = "scorepool"
PREFIX = os.environ.get("SCOREPOOL_REDIS_PREFIX", DEFAULT_PREFIX)  # every process checks it with Settings.load
_QUEUE_PREFIX = "" if PREFIX == DEFAULT_PREFIX else f"{PREFIX}::"

INFER = "worker.infer"  # the job function that runs one wire.Request on the engine
DELIVER = "worker.webhook.deliver"  # the job function that sends one event to one receiver
WEBHOOKS_NAME = "webhooks"
WEBHOOKS = f"{_QUEUE_PREFIX}{WEBHOOKS_NAME}"  # the queue of webhook deliveries
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

_JOB = "rq:job:" if PREFIX == DEFAULT_PREFIX else f"rq:job:{PREFIX}:"


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
    def speeds(queue: str) -> str:
        """hash: how fast the workers of the queue are, see store/lua/speeds.lua."""
        return f"{PREFIX}:speeds:{queue}"


class RqKeys:
    """RQ's keys, as RQ 2.12 spells them."""

    queues = "rq:queues"  # set: keys of all queues
    suspended = "rq:suspended"  # exists while `rq suspend` holds
    workers = "rq:workers"  # set: keys of all workers

    @staticmethod
    def queue(queue: str) -> str:
        return f"rq:queue:{queue}"

    @staticmethod
    def registry(name: str, queue: str) -> str:
        """zset: ids of the jobs of a queue in one state.

        `name` is wip, finished, failed, deferred, scheduled, canceled.
        """
        return f"rq:{name}:{queue}"

    @staticmethod
    def job(job_id: str) -> str:
        """hash: see job_fields.py."""
        return f"{_JOB}{job_id}"

    @staticmethod
    def dependents(job_id: str) -> str:
        """set: ids of the jobs that wait for this one."""
        return f"{RqKeys.job(job_id)}:dependents"

    @staticmethod
    def execution(lease_key: str) -> str:
        """hash that expires when the lease is over."""
        return f"rq:execution:{lease_key}"

    @staticmethod
    def executions(job_id: str) -> str:
        return f"rq:executions:{job_id}"

    @staticmethod
    def results(job_id: str) -> str:
        """stream: RQ's own record of the job's results."""
        return f"rq:results:{job_id}"

    @staticmethod
    def worker(name: str) -> str:
        return f"rq:worker:{name}"

    @staticmethod
    def workers_of(queue: str) -> str:
        return f"rq:workers:{queue}"

    @staticmethod
    def commands(worker: str) -> str:
        """Channel: commands for one worker."""
        return f"rq:pubsub:{worker}"


def rq_queue(name: str) -> str:
    """Return the name that RQ gives the queue `name` of this deployment, which may have been given already."""
    return name if name.startswith(_QUEUE_PREFIX) else f"{_QUEUE_PREFIX}{name}"


def is_own_queue(queue: str) -> bool:
    """True if the queue, by its name in RQ, belongs to this deployment."""
    return queue.startswith(_QUEUE_PREFIX) if _QUEUE_PREFIX else "::" not in queue


def queue_name(model: str, priority: Priority) -> str:
    """Return RQ's name of the queue of a model and a priority."""
    return rq_queue(model if priority == "normal" else f"{model}:{priority}")


def queue_names(*names: str) -> list[str]:
    """Return the queues of a model, the first to be drained first.

    Jobs for an alias are in the queues of the model's first name, except those that were accepted while no worker was
    live, when the alias could not be resolved.
    """
    return [queue_name(name, priority) for priority in get_args(Priority) for name in names]


# The names that scripts use. The prelude of a script (scripts.py) defines those that it mentions.
LUA_CONSTANTS: dict[str, str | int] = {
    "DELIVER": DELIVER,
    "WEBHOOKS": WEBHOOKS,
    "DELIVERY_KEPT_S": DELIVERY_KEPT_S,
    "MEMORY_FOR_NEW": MEMORY_FOR_NEW,
    "MEMORY_FOR_CLAIMS": MEMORY_FOR_CLAIMS,
    # ours; a name that ends in _ is a prefix
    "REQUEST_": Keys.request(""),
    "RESPONSE_": Keys.response(""),
    "OUTCOME_": Keys.outcome(""),
    "OUTCOME_UPLOAD_": Keys.outcome_upload(""),
    "CHECKPOINT_": Keys.checkpoint(""),
    "CHECKPOINT_COUNTS": Keys.checkpoint_counts,
    "STORED_RESULTS": Keys.stored_results,
    "MAX_RECORD_BYTES": MAX_RECORD_BYTES,
    "DELIVERY_ID_": Keys.delivery(""),
    "ENDPOINTS_OF_": Keys.endpoints_of(""),
    "FILE_": Keys.file(""),
    "_PARTS": Keys.file_parts("").removeprefix(Keys.file("")),
    "READER_": Keys.file_reader(""),
    "FILES_OF_": Keys.files_of(""),
    "DELIVERIES_OF_": Keys.deliveries_of(""),
    "JOBS_OF_": Keys.jobs_of(""),
    "BACKLOG_": Keys.backlog("", "")[:-1],  # <queue>:<owner> follows
    "FAIR_SHARE_": Keys.fair_share(""),
    "SERVED_": Keys.served(""),
    "WAKE_": Keys.wake(""),
    "WAITING_WORKERS_": Keys.waiting_workers(""),
    "SPEEDS_": Keys.speeds(""),
    "SPEED_TOTALS_": Keys.speed_totals(""),
    "NOTHING_UNBEGUN_": Keys.nothing_unbegun(""),
    "DONE": DONE,
    "OUTCOME_COUNTS": Keys.outcome_counts,
    "LATENCY_MS": LATENCY_MS,
    "SWEEP_SCHEDULE": Keys.sweep_schedule,
    "LEDGER_OF_": Keys.ledger_of(""),
    "SIZES_OF_": Keys.sizes_of(""),
    "FILE_ID_": FILE_ID,
    "BATCH_ID_": BATCH_ID,
    "BATCH_": Keys.batch(""),
    "BATCH_TURNS": Keys.batch_turns,
    "BATCHES_OF_": Keys.batches_of(""),
    "LIVE_BATCHES_OF_": Keys.live_batches_of(""),
    "DELIVERY_BYTES": DELIVERY_BYTES,
    "LIST_LENGTH": LIST_LENGTH,
    "FILE_BYTES": FILE_BYTES,
    "JOB_BYTES": JOB_BYTES,
    "UNSERVED": Keys.unserved,
    "UNSERVED_OF_": Keys.unserved_of(""),
    "MODELS": Keys.models,
    "SERVED_MODEL_": Keys.served_model(""),
    "CROSSCHECK_INBOX_": Keys.crosscheck_inbox(""),
    "RESULT_CACHE": Keys.result_cache,
    "RESULT_CACHE_USES": Keys.result_cache_uses,
    "RESULT_CACHE_COUNTS": Keys.result_cache_counts,
    "WEIGHTS_": Keys.weights(""),
    "WEIGHTS_WORKERS_": Keys.weights_workers(""),
    "WEIGHTS_MOVES_": Keys.weights_moves(""),
    "WEIGHTS_CHANGED_": Keys.weights_changed(""),
    "WEIGHTS_UPLOAD_": Keys.weights_upload(""),
    "PAUSED": Keys.paused,
    "RECENT_MODELS": Keys.recent_models,
    "RECENT_MODEL_": Keys.recent_model(""),
    # RQ's
    "QUEUES": RqKeys.queues,
    "OWN_QUEUE_": RqKeys.queue(_QUEUE_PREFIX),
    "SUSPENDED": RqKeys.suspended,
    "WORKERS": RqKeys.workers,
    "WORKER_": RqKeys.worker(""),
    "WORKERS_OF_": RqKeys.workers_of(""),
    "QUEUE_": RqKeys.queue(""),
    "WIP_": RqKeys.registry("wip", ""),
    "FINISHED_": RqKeys.registry("finished", ""),
    "FAILED_": RqKeys.registry("failed", ""),
    "CANCELED_": RqKeys.registry("canceled", ""),
    "DEFERRED_": RqKeys.registry("deferred", ""),
    "SCHEDULED_": RqKeys.registry("scheduled", ""),
    "JOB_": RqKeys.job(""),
    "_DEPENDENTS": RqKeys.dependents("").removeprefix(RqKeys.job("")),
    "_DEPENDENCIES": ":dependencies",
    "EXECUTION_": RqKeys.execution(""),
    "EXECUTIONS_": RqKeys.executions(""),
    "RESULTS_": RqKeys.results(""),
    "COMMANDS_": RqKeys.commands(""),
}
