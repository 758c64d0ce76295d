"""Names in Redis that more than one process uses. RQ's own keys begin with `rq:`, ours with `scorepool:`."""

from typing import get_args

from scorepool.wire.request import Priority

INFER = "worker.infer"  # the job function: run one wire.Request on the engine
DELIVER = "worker.webhook.deliver"  # the job function: tell one receiver of one event
WEBHOOKS = "webhooks"  # the queue of deliveries
TOKENS = "scorepool:tokens"  # stream: one entry {step} per step of a worker whose rows stream; on no disk
DONE = "scorepool:done"  # stream: one entry {id} per job that ended


class Keys:
    """Every key of ours by name. `id` is a job's."""

    models = "scorepool:models"  # zset: worker name by the time (unix, s) at which its card expires

    recent_models = "scorepool:recent_models"  # zset: models by the time (unix, s) at which they were last served

    @staticmethod
    def recent_model(model: str) -> str:
        """string: the last ServedModel, kept for SCOREPOOL_MODEL_GRACE_S after the model's last worker has gone."""
        return f"scorepool:recent_model:{model}"

    outcomes = "scorepool:outcomes"  # hash: how many jobs ended, by `result` or the failure's code

    @staticmethod
    def request(id: str) -> str:  # noqa: A002
        return f"scorepool:request:{id}"

    @staticmethod
    def outcome(id: str) -> str:  # noqa: A002
        return f"scorepool:outcome:{id}"

    @staticmethod
    def delivery(id: str) -> str:  # noqa: A002
        """The id of the RQ job that delivers this job's own webhook; also the `webhook-id`, constant over retries."""
        return f"wh_{id}"

    @staticmethod
    def endpoints(owner: str) -> str:
        """hash: an owner's webhook endpoints, id: wire.Subscriber in JSON."""
        return f"scorepool:endpoints:{owner}"

    @staticmethod
    def deliveries(owner: str) -> str:
        """zset: ids of an owner's deliveries by the time (unix, s) of their making."""
        return f"scorepool:deliveries:{owner}"

    batches = "scorepool:batches"  # zset: batches that have not ended by the time (unix, s) of their next turn

    @staticmethod
    def batch(id: str) -> str:  # noqa: A002
        """hash: owner, state, cancel, turn (api/repositories/batches.py, turn.py)."""
        return f"scorepool:batch:{id}"

    @staticmethod
    def batch_lines(id: str) -> str:  # noqa: A002
        """hash: the lines of a batch that have jobs, `<line>.<number of jobs>`: the line."""
        return f"scorepool:batch:{id}:lines"

    @staticmethod
    def batches_of(owner: str) -> str:
        """zset: ids of an owner's batches by time of creation (unix, s)."""
        return f"scorepool:batches:{owner}"

    @staticmethod
    def file(id: str) -> str:  # noqa: A002
        """hash: owner, file, and a `batch:<id>` for each batch that has yet to read it."""
        return f"scorepool:file:{id}"

    @staticmethod
    def file_parts(id: str) -> str:  # noqa: A002
        """hash: whole lines of a file, zlib, by number from 0."""
        return f"scorepool:file:{id}:parts"

    @staticmethod
    def files_of(owner: str) -> str:
        """zset: ids of an owner's files by time of creation (unix, s)."""
        return f"scorepool:files:{owner}"

    @staticmethod
    def owned(owner: str) -> str:
        """zset: ids of an owner's jobs by time of submission (unix, s)."""
        return f"scorepool:owned:{owner}"

    @staticmethod
    def backlog(queue: str, owner: str) -> str:
        """list: ids of the owner's jobs that wait behind RQ's list of the queue, see store/lua/backlog.lua."""
        return f"scorepool:backlog:{queue}:{owner}"

    @staticmethod
    def fair_share(queue: str) -> str:
        """zset: the owners that have a backlog, by how much they had of the queue."""
        return f"scorepool:turns:{queue}"

    @staticmethod
    def card(worker: str) -> str:
        return f"scorepool:card:{worker}"

    @staticmethod
    def wakeup(queue: str) -> str:
        """Channel: rung when a job is put on the queue."""
        return f"scorepool:bell:{queue}"


def queue_name(model: str, priority: Priority) -> str:
    return model if priority == "normal" else f"{model}:{priority}"


def queue_names(*names: str) -> list[str]:
    """The queues of a model, the first to be drained first.

    Jobs for an alias are in the queues of the model's first name, but for those that came while no worker was live and
    nobody knew whose alias it is.
    """
    return [queue_name(name, priority) for priority in get_args(Priority) for name in names]
