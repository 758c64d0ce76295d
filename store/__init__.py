"""The typed access to Redis: names of keys, fields of a job's hash, scripts and their loader, settings.

It imports only wire.

A job's states, as RQ spells them in `status`, and the script or method that moves a job along each arrow:

                submit                 submit (queue shared by owners)
                  │                       │
                  ▼       top_up          ▼
               queued ◄──────────────  deferred            scheduled ◄──── retry with a delay (commit)
                │ ▲ ▲                     │                   │ │
          claim │ │ └─────────────────────┼── enqueue_due ────┘ │
                ▼ │ reclaim, release      │                     │
             started ─────────────────────┼─────────────────────┤
                │                         ▼                     │
                │ finish      finished    │                     │
                ├───────────► result      │                     │
                │ commit      failed      │                     │
                ├───────────► Failure     │                     │
                │ commit      stopped*    │ cancel, empty       │
                └───────────► Failure     └──► canceled* ◄──────┘

    * the API shows both as `canceled`

A job leaves `started` in one of three ways: its worker records its end while it holds the lease; it puts the job back
(release, on shutdown); or the lease expires and any worker puts the job back (reclaim). A `scheduled` job that is due
becomes `deferred` if a new job of its queue would (lua/backlog.lua). `queued`, `deferred` and `scheduled` jobs are
canceled at once; a `started` job is marked, and its worker ends it. The API shows a job past its `expires_at` that no
worker holds as failed (lua/expiry.lua); the worker that claims it records this, and the job is not `started` again.
Whoever ends a job calls `end_job` or `record_outcome` (lua/end_job.lua) in the transaction that sets its status.
"""

from scorepool.store.job_fields import JobField
from scorepool.store.keys import (
    BATCH_BYTES,
    DELIVER,
    DELIVERY_BYTES,
    DELIVERY_KEPT_S,
    DONE,
    FILE_BYTES,
    INFER,
    JOB_BYTES,
    LATENCY_MS,
    LIST_LENGTH,
    MEMORY_FOR_NEW,
    TOKENS,
    WEBHOOKS,
    Keys,
)
from scorepool.store.redis_url import has_password
from scorepool.store.rq_keys import RqKeys, is_own_queue, queue_name, queue_names, rq_queue
from scorepool.store.sentinel import SentinelUrl
from scorepool.store.server_map import MappedServer, ServerMap
from scorepool.store.settings import (
    KEY_NAME,
    LOCAL_OWNER,
    AdapterSpec,
    Settings,
    SettingsError,
    parse_adapters,
    parse_drafts,
    parse_model,
    parse_models,
)
from scorepool.store.webhook_secret import decode_webhook_secrets, encode_webhook_secret, webhook_secrets
from scorepool.store.webhook_url import ImageUrl, WebhookUrl, is_public, literal_address

__all__ = [
    "BATCH_BYTES",
    "DELIVER",
    "DELIVERY_BYTES",
    "DELIVERY_KEPT_S",
    "DONE",
    "FILE_BYTES",
    "INFER",
    "JOB_BYTES",
    "KEY_NAME",
    "LATENCY_MS",
    "LIST_LENGTH",
    "LOCAL_OWNER",
    "MEMORY_FOR_NEW",
    "TOKENS",
    "WEBHOOKS",
    "AdapterSpec",
    "ImageUrl",
    "JobField",
    "Keys",
    "MappedServer",
    "RqKeys",
    "SentinelUrl",
    "ServerMap",
    "Settings",
    "SettingsError",
    "WebhookUrl",
    "decode_webhook_secrets",
    "encode_webhook_secret",
    "has_password",
    "is_own_queue",
    "is_public",
    "literal_address",
    "parse_adapters",
    "parse_drafts",
    "parse_model",
    "parse_models",
    "queue_name",
    "queue_names",
    "rq_queue",
    "webhook_secrets",
]
