"""Tell the errors of Redis that a worker waits out from those that end it with a message."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    ExecAbortError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool.store import SettingsError
from scorepool.worker.rq.errors import StartError

# Redis is away, or refuses commands for a while (connection.Refusing): jobs in flight are kept, and it is tried again.
# ExecAbortError: it began to refuse them within a transaction, of which it has done nothing. NoScriptError: it forgot a
# script as soon as it was loaded.
REDIS_UNAVAILABLE = (
    *(RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError),
    *(ExecAbortError, NoScriptError),
)


@contextmanager
def exit_with_message() -> Iterator[None]:
    """End the process with one sentence and exit status 1 for what its user must mend.

    Errors of Redis get here at the start and at the end of a worker only: in between the loop waits them out.
    """
    try:
        yield
    except (SettingsError, StartError) as error:
        raise SystemExit(f"scorepool: {error}") from None
    except (*REDIS_UNAVAILABLE, NoPermissionError) as error:
        raise SystemExit(f"scorepool: Redis (SCOREPOOL_REDIS_URL, or `rq worker --url`): {error}") from None
