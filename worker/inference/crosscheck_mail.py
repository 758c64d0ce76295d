"""Crosschecks in Redis: find the other workers of a model, send and receive messages, count outcomes."""

import hashlib
import logging
from collections.abc import Collection
from typing import Any, Literal

from redis import Redis
from rq.utils import as_text

from scorepool.store import Keys
from scorepool.store.scripts import load
from scorepool.wire import (
    Crosscheck,
    CrosscheckMessage,
    Invalid,
    Provenance,
    ServedModel,
    are_of_one_model,
    encode,
    parse,
)

MAX_MESSAGES = 256  # in one inbox; a worker that is behind gets no more
MAX_INBOX_BYTES = 32 * 2**20  # of Redis's memory, which jobs need; one message more may exceed it
MESSAGE_TTL_S = 600
COUNTERS_TTL_S = 30 * 86_400

CrosscheckOutcome = Literal["agreed", "differed", "stopped"]
log = logging.getLogger(__name__)


def is_chosen(job_id: str, share: float) -> bool:
    """True if the job belongs to the share that is checked. Every process decides alike."""
    return _hash(job_id) < share * 2**64


def _hash(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big")


class CrosscheckMail:
    """The messages of one worker. Used by one thread."""

    def __init__(self, connection: Redis, worker: str) -> None:
        self.worker = worker
        self._connection = connection
        self._send = connection.register_script(load("send_crosscheck.lua"))

    def send(self, worker: str, message: CrosscheckMessage) -> bool:
        """Send a message to a worker; return whether its inbox took it. Raises RedisError."""
        return self._put(worker, encode(message))

    def send_to_another(self, check: Crosscheck, stamp: Provenance) -> str | None:
        """Send a crosscheck to a worker of the same model that has not computed it; return its name.

        None: there is none, or all are behind. Raises RedisError.
        """
        others = sorted(self.others({self.worker, *(one.worker for one in check.computations)}, stamp))
        if not others:
            return None
        message = encode(check)
        start = _hash(check.job_id) % len(others)
        return next((worker for worker in [*others[start:], *others[:start]] if self._put(worker, message)), None)

    def receive(self) -> CrosscheckMessage | None:
        """Take the next message; None if there is none. Messages that cannot be read are dropped. Raises RedisError."""
        inbox = Keys.crosscheck_inbox(self.worker)
        while (body := self._connection.lpop(inbox)) is not None:
            try:
                return parse(body, CrosscheckMessage, "msgpack")  # type: ignore[arg-type]
            except Invalid as error:
                log.warning("a message in the Redis key %s is dropped: %s", inbox, error)
        return None

    def clear(self) -> None:
        """Drop all messages. Raises RedisError."""
        self._connection.delete(Keys.crosscheck_inbox(self.worker))

    def count(self, outcome: CrosscheckOutcome) -> None:
        """Count an outcome. Raises RedisError."""
        with self._connection.pipeline() as pipeline:
            pipeline.hincrby(Keys.crosscheck_counts, outcome, 1)
            pipeline.expire(Keys.crosscheck_counts, COUNTERS_TTL_S)
            pipeline.execute()

    def others(self, known: Collection[str], stamp: Provenance) -> set[str]:
        """Return the workers whose results must agree with those of this stamp, apart from the known ones.

        Each takes part in crosschecks and takes jobs. Raises RedisError.
        """
        names: Any = self._connection.zrange(Keys.models, 0, -1)
        workers = [as_text(name) for name in names]
        stored: Any = self._connection.mget([Keys.served_model(worker) for worker in workers]) if workers else []
        cards = dict(zip(workers, map(_served_model, stored), strict=True))
        processes = {card.worker for worker, card in cards.items() if worker in known and card is not None}
        return {
            worker
            for worker, card in cards.items()
            if worker not in known
            and card is not None
            and card.worker not in processes  # one that serves the same weights under two names is one machine
            and card.crosscheck is not None
            and card.takes_jobs
            and card.stamp.mode == stamp.mode
            and are_of_one_model(card.stamp, stamp)
        }

    def _put(self, worker: str, message: bytes) -> bool:
        return bool(self._send(args=[worker, message, MAX_MESSAGES, MAX_INBOX_BYTES, MESSAGE_TTL_S]))


def _served_model(card: bytes | None) -> ServedModel | None:
    try:
        return None if card is None else parse(card, ServedModel, "msgpack")
    except Invalid:
        return None
