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
from scorepool.store.logs import end_process
from scorepool.worker.rq.errors import StartError

# Redis is unavailable, or refuses commands for a while (connection.Refusing): jobs in flight are kept, and the command
# is tried again. ExecAbortError: Redis began to refuse commands within a transaction and ran none of it.
# NoScriptError: Redis dropped a script after it was loaded.
REDIS_UNAVAILABLE = (
    *(RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError),
    *(ExecAbortError, NoScriptError),
)


@contextmanager
def exit_with_message() -> Iterator[None]:
    """End the process with one sentence and exit status 1 if its user must correct the cause.

    Errors of Redis reach this function only at the start and end of a worker. The loop waits out all others.
    """
    try:
        yield
    except (SettingsError, StartError) as error:
        end_process(str(error))
    except (*REDIS_UNAVAILABLE, NoPermissionError) as error:
        end_process(f"Redis (SCOREPOOL_REDIS_URL, or `rq worker --url`): {error}")
