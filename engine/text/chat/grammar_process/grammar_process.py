"""One grammar as the engine's process sees it: where its process is, and what its sequences wait for.

    idle ──► waiting ──► compiling ──► ready ──► idle    its process made room for others, or was killed by others
                ▲            │           │
                └──(longer)──┴───────────┴─────► failed  for good, with a reason

Knows no threads: `Grammars` holds its lock around everything here.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, Protocol

from scorepool.engine.text.chat.grammar_process import fork_server
from scorepool.engine.text.chat.grammar_process.compile_queue import LANES, Lane


@dataclass(frozen=True, slots=True)
class Reply:
    """What may follow, and what may follow after each proposed token that may. Nothing if there is an error."""

    bitmasks: Sequence[bytes | None] = (None,)  # None: only an end token
    error: str | None = None


class Asker(Protocol):
    """A sequence that waits for a bitmask."""

    number: int
    generated: Sequence[int]  # the tokens after which it wants one
    proposed: Sequence[int]  # those after each of which it also wants one, if they may follow
    num_consumed: int  # tokens that the process has, or was sent
    run: int  # of the grammar's process, that has them
    reply: Reply | None


@dataclass(slots=True, eq=False)
class GrammarProcess:
    text: str
    owner: str
    explain: Callable[[str, str], str]  # (text, error of llguidance) to a sentence
    state: Literal["idle", "waiting", "compiling", "ready", "failed"] = "idle"
    error: str | None = None  # why it failed
    lane: Lane = LANES[0]
    compiled: list[Future[None]] = field(default_factory=list)  # those that wait for it
    first_reply: Reply | None = None  # before any token

    run: int = 0  # number of its process, new with each
    connection: Connection | None = None
    num_deaths: int = 0  # of its processes since the last answer, by no fault of the grammar's
    memory_bytes: int = 0
    is_slow: bool = False  # its steps take long
    asking: dict[int, Asker] = field(default_factory=dict)  # by number
    num_unanswered: int = 0  # of those, were sent
    forgotten: deque[int] = field(default_factory=deque)  # numbers of sequences that are over
    used_at: float = 0.0  # time.monotonic()
    busy_since: float = 0.0  # time.monotonic(), while it is busy

    @property
    def is_busy(self) -> bool:
        """True if its process computes."""
        return self.state == "compiling" or self.num_unanswered > 0

    @property
    def is_abandoned(self) -> bool:
        """True if all that waited for it were canceled."""
        return bool(self.compiled) and not self.asking and all(future.cancelled() for future in self.compiled)

    def send_compile(self) -> None:
        """Have it compiled by the process that was forked for it. Raises OSError."""
        if self.connection is not None:
            order = fork_server.COMPILE.pack(self.lane.limit_s, self.lane.niceness)
            self.connection.send_bytes(order + self.text.encode())

    def send_steps(self) -> None:
        """Send the questions that wait, if the process has answered all others: then it reads. Raises OSError."""
        if self.state == "ready" and self.connection is not None and self.asking and not self.num_unanswered:
            steps = [*self._forget(), *map(self._step, self.asking.values())]
            self.num_unanswered = len(self.asking)
            self.connection.send_bytes(b"".join(steps))

    def read(self, message: bytes) -> None:
        """Take in a message of its process."""
        kind, number, self.memory_bytes, self.is_slow, num_bitmasks = fork_server.REPLY.unpack_from(message)
        payload = message[fork_server.REPLY.size :]
        self.num_deaths = 0
        if kind == fork_server.ERROR:
            reply = Reply(error=self.explain(self.text, payload.decode(errors="replace")))
        else:
            size = len(payload) // max(1, num_bitmasks)
            bitmasks = [payload[start : start + size] for start in range(0, len(payload), max(1, size))]
            reply = Reply([*bitmasks, None] if kind == fork_server.ENDED else bitmasks)
        if self.state == "compiling":
            self.first_reply = reply
        elif asker := self.asking.pop(number, None):
            asker.reply = reply
            self.num_unanswered -= 1

    def forget_run(self) -> None:
        """Note that its process is gone."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self.num_unanswered, self.memory_bytes = None, 0, 0
        self.forgotten.clear()

    def fail(self, error: str) -> None:
        """Answer every question with this error, now and later."""
        self.state, self.error, self.text = "failed", error, ""
        for asker in self.asking.values():
            asker.reply = Reply(error=error)
        self.asking.clear()

    def _step(self, asker: Asker) -> bytes:
        if asker.run != self.run:
            asker.run, asker.num_consumed = self.run, 0  # a new process has to consume all tokens
        new = array("I", asker.generated[asker.num_consumed :])
        asker.num_consumed = len(asker.generated)
        proposed = array("I", asker.proposed)
        return fork_server.STEP.pack(asker.number, len(new), len(proposed)) + new.tobytes() + proposed.tobytes()

    def _forget(self) -> Iterator[bytes]:
        while self.forgotten:
            yield fork_server.STEP.pack(self.forgotten.popleft(), fork_server.FORGET, 0)
