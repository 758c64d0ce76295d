"""The fields of the hash that RQ keeps of a job (`rq:job:<id>`): RQ's and ours, each spelled here only."""


class JobField:
    """The fields of a job's hash. Lua has each as `F_<name>`."""

    # RQ's
    DATA = "data"  # the function and its arguments
    ORIGIN = "origin"  # name of the queue
    STATUS = "status"
    DESCRIPTION = "description"
    CREATED_AT = "created_at"  # ISO, like the three below
    ENQUEUED_AT = "enqueued_at"
    STARTED_AT = "started_at"
    ENDED_AT = "ended_at"
    LAST_HEARTBEAT = "last_heartbeat"
    WORKER_NAME = "worker_name"
    TIMEOUT = "timeout"
    RESULT_TTL = "result_ttl"
    FAILURE_TTL = "failure_ttl"
    RETRIES_LEFT = "retries_left"
    RETRY_INTERVALS = "retry_intervals"
    NUMBER_OF_RETRIES = "number_of_retries"
    ENQUEUE_AT_FRONT = "enqueue_at_front"
    ENQUEUE_AT_FRONT_ON_RETRY = "enqueue_at_front_on_retry"
    # ours, of every job of the API
    OWNER = "owner"
    MODEL = "model"
    KIND = "kind"  # of wire.Request; a job that has it ends with an outcome
    FINGERPRINT = "fingerprint"  # of the submission, for the Idempotency-Key
    CREATED = "created"  # unix, s, by Redis's clock; no two jobs of one owner have the same
    # ours, where they apply
    WEIGHT = "weight"  # the owner's share of a queue; absent where the API knows one owner
    EXPIRES_AT = "expires_at"  # unix, s
    IF_WEIGHTS = "if_weights"  # the version of the weights for which it waits among the scheduled jobs
    WEBHOOK = "webhook"  # URL
    BATCH = "batch"  # the id of the batch whose line it is; of a delivery: of the batch that ended
    SYNCHRONOUS = "synchronous"  # "1": its client waits for the answer, so endpoints get no event
    TRACEPARENT = "traceparent"  # of the submission's span, and in deliveries too; see traces.py
    CANCEL_REQUESTED = "cancel_requested"  # "1": its owner canceled it while it ran
    CRASHES = "crashes"  # deaths of workers that ran this job alone, since it got further than before
    MAX_CONCURRENCY = "company"  # jobs in flight beside which it may run, itself included: it may kill its worker
    FURTHEST = "furthest"  # most finished rows that were ever kept, while it runs
    CHECKPOINT = "checkpoint"  # how many of its rows are finished and kept, while it runs
    NUM_ENDS = "ends"  # how many times it has ended, if it has webhooks
    DELIVERIES = "deliveries"  # ids of the deliveries that report its end, space-separated
    # ours, of a delivery (lua/outbox.lua)
    EVENT = "event"
    EVENT_AT = "at"  # ISO: when the event happened
    JOB = "job"
    ENDPOINT = "endpoint"
    URL = "url"
    SCHEDULED_FROM = "since"  # unix, s: the schedule of its attempts began
    NUM_ATTEMPTS = "tries"
    ATTEMPTS = "attempts"  # JSON: list of wire.DeliveryAttempt
    REASON = "reason"  # why it was given up

    @classmethod
    def all(cls) -> dict[str, str]:
        """Return the fields by their constants."""
        return {name: value for name, value in vars(cls).items() if name.isupper()}
