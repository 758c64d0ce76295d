"""Run several scripts in one round trip."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError

ARGUMENT_BYTES = 16  # of a message around each argument, and of a number

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class ScriptCall:
    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]

    @property
    def size_bytes(self) -> int:
        """About how large it is on its way to Redis."""
        texts = [argument for argument in (*self.keys, *self.arguments) if isinstance(argument, str | bytes)]
        return sum(map(len, texts)) + ARGUMENT_BYTES * (len(self.keys) + len(self.arguments))


def load_scripts(connection: Redis, scripts: Iterable[Script]) -> None:
    """Make scripts known to Redis, so that the first call of each is not sent twice. Calls can be large."""
    with connection.pipeline(transaction=False) as pipeline:
        for script in scripts:
            pipeline.script_load(script.script)
        pipeline.execute()


def run_scripts(connection: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run scripts in one round trip, and those that Redis does not know once more. Raises the first error."""
    with connection.pipeline(transaction=False) as pipeline:
        for call in calls:
            pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
        replies = pipeline.execute(raise_on_error=False)
    for index, call in enumerate(calls):
        if isinstance(replies[index], NoScriptError):
            load_scripts(connection, [call.script])
            replies[index] = connection.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
        if isinstance(replies[index], Exception):
            raise replies[index]
    return replies
