"""All grammars of one model: cached by owner and text, bounded in number, time and memory. One thread serves them.

A grammar that takes too much fails alone; every other goes on, or starts again where it was. What is cached for one
owner is not for another, who could otherwise find out what the first one asks for.
"""

import logging
import selectors
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from multiprocessing.connection import Connection
from socket import socket, socketpair
from threading import Condition, Thread

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.text.chat.grammar_process import fork_server
from scorepool.engine.text.chat.grammar_process.compile_queue import LANES, CompileQueue, next_lane
from scorepool.engine.text.chat.grammar_process.fork_server_link import ForkServerLink
from scorepool.engine.text.chat.grammar_process.grammar_process import Asker, GrammarProcess

log = logging.getLogger(__name__)

MAX_CACHED = 512  # grammars, failed ones included
MAX_PROCESSES = 128
MAX_IDLE = 8  # processes that were not used for IDLE_S
IDLE_S = 5.0
MAX_MEMORY_BYTES = 2**30  # of all processes, beside what they share
MAX_SLOW = 2  # slow grammars whose steps are computed at the same time
MAX_DEATHS = 2  # of a grammar's processes, by no fault of the grammar's
HANG_S = 60.0  # in which a process answers, although others have the processor
TICK_S = 1.0

_SIMPLER = "use a simpler schema, with fewer and shorter patterns and alternatives"
_REASONS = {
    -signal.SIGABRT: f"it takes more than {fork_server.MEMORY_BYTES >> 20} MiB of memory: {_SIMPLER}",
    fork_server.EXIT_MEMORY: f"it takes more than {fork_server.MEMORY_BYTES >> 20} MiB of memory: {_SIMPLER}",
    -signal.SIGSEGV: "it is nested too deeply",
    -signal.SIGBUS: "it is nested too deeply",
}
_COMPILE_TIME = f"compiling it takes more than {LANES[-1].limit_s:g} s: {_SIMPLER}"
_STEP_TIME = (
    f"finding what may follow takes more than {fork_server.STEP_S:g} s for a token, "
    f"or {fork_server.SPENT_PER_STEP_S * 1000:g} ms on average: {_SIMPLER}"
)
_TOTAL_MEMORY = f"it takes the most memory of all that run, together more than {MAX_MEMORY_BYTES >> 20} MiB: {_SIMPLER}"


class Grammars:
    def __init__(self, tokenizer: Callable[[], bytes]) -> None:
        """Start nothing yet: a fork server takes a second and the tokenizer's memory."""
        self.changed = Condition()  # guards everything here and in the grammars
        self._tokenizer = tokenizer
        self._cached: OrderedDict[tuple[str, bytes], GrammarProcess] = OrderedDict()
        self._num_runs = 0
        self._events: list[Callable[[], object]] = []  # to be called without the lock
        self._is_closed = False
        self._reset()

    def _reset(self) -> None:
        """Start with no thread, no server and no processes."""
        self._queue: CompileQueue[GrammarProcess] = CompileQueue()
        self._slow: OrderedDict[GrammarProcess, None] = OrderedDict()  # those that are to be asked next
        self._runs: dict[int, GrammarProcess] = {}  # by number of the process, which may still be ending
        self._server: ForkServerLink | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup: socket | None = None
        self._waker: socket | None = None

    # Called by any thread.

    def get(self, text: str, owner: str, explain: Callable[[str, str], str]) -> GrammarProcess:
        """Return the grammar, compiled or not. `explain` makes a sentence of the text and an error of llguidance."""
        key = owner, blake2b(text.encode(), digest_size=16).digest()
        with self.changed:
            grammar = self._cached.setdefault(key, GrammarProcess(text, owner, explain))
            self._cached.move_to_end(key)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return grammar

    def compile(self, grammar: GrammarProcess) -> Future[None]:
        """Have it compiled. The future gets InvalidRequest if it cannot be; cancel it if nobody waits any more."""
        future: Future[None] = Future()
        with self._events_after():
            grammar.used_at = time.monotonic()
            if grammar.error is not None:
                self._events.append(partial(future.set_exception, InvalidRequest(grammar.error)))
            elif grammar.state == "ready":
                self._events.append(partial(future.set_result, None))
            else:
                grammar.compiled.append(future)
                self._start_waiting(grammar)
        return future

    def ask(self, grammar: GrammarProcess, asker: Asker) -> None:
        """Have a bitmask found for a sequence. Returns at once."""
        with self._events_after():
            grammar.used_at = time.monotonic()
            if grammar.state == "failed":
                grammar.asking[asker.number] = asker
                grammar.fail(grammar.error or "")
                return
            grammar.asking[asker.number] = asker
            if grammar.state == "ready":
                self._send_steps(grammar)
            else:
                self._start_waiting(grammar)

    def close(self) -> None:
        """End the processes. Does not wait."""
        self._is_closed = True
        self._wake()

    # With the lock.

    def _start_waiting(self, grammar: GrammarProcess) -> None:
        if grammar.state == "idle":
            grammar.state = "waiting"
            self._queue.put(grammar)
            if self._waker is None:
                self._wakeup, self._waker = socketpair()
                self._waker.setblocking(False)
                self._selector.register(self._wakeup, selectors.EVENT_READ)
                Thread(target=self._serve, name="grammars", daemon=True).start()
            self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            with suppress(BlockingIOError):  # then it is awake
                self._waker.send(b"\0")

    @contextmanager
    def _events_after(self) -> Iterator[None]:
        """Hold the lock, then call what has come up meanwhile: callbacks of futures, which may come back here."""
        with self.changed:
            yield
            events, self._events = self._events, []
        for event in events:
            event()

    def _try(self, grammar: GrammarProcess, send: Callable[[], None]) -> None:
        """Send something to a grammar's process. If it has just ended, the server will say so."""
        try:
            send()
        except OSError:
            log.debug("the process of grammar %d has ended", grammar.run)

    def _send_steps(self, grammar: GrammarProcess) -> None:
        num_slow = sum(other.is_slow and other.num_unanswered > 0 for other in self._runs.values())
        if grammar.is_slow and num_slow >= MAX_SLOW:
            self._slow[grammar] = None
        elif not grammar.num_unanswered:
            self._slow.pop(grammar, None)
            grammar.used_at = grammar.busy_since = time.monotonic()
            self._try(grammar, grammar.send_steps)

    def _resolve(self, grammar: GrammarProcess, error: Exception | None = None) -> None:
        """Tell those that wait for it that it is compiled, or why it is not."""
        waiting, grammar.compiled = grammar.compiled, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                self._events.append(
                    partial(future.set_result, None) if error is None else partial(future.set_exception, error)
                )

    def _fail(self, grammar: GrammarProcess, error: str) -> None:
        self._leave_queue(grammar)
        self._end_run(grammar)
        grammar.fail(error)
        self._resolve(grammar, InvalidRequest(error))

    def _leave_queue(self, grammar: GrammarProcess) -> None:
        used_s = time.monotonic() - grammar.busy_since if grammar.state == "compiling" else 0.0
        self._queue.done(grammar, used_s)

    def _make_idle(self, grammar: GrammarProcess) -> None:
        """Take away its process. It gets another when it is asked again, which consumes all tokens anew."""
        self._end_run(grammar)
        grammar.state = "idle"

    def _end_run(self, grammar: GrammarProcess) -> None:
        """Kill its process, if it has one."""
        if grammar.connection is not None:
            self._selector.unregister(grammar.connection)
            if self._server is not None:
                self._try(grammar, partial(self._server.kill, grammar.run))
        self._runs.pop(grammar.run, None)
        grammar.forget_run()

    # On the thread.

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                with self._events_after():
                    self._compile_next()
                is_waiting = len(self._runs) > MAX_IDLE or any(one.is_busy for one in list(self._runs.values()))
                ready = self._selector.select(TICK_S if is_waiting else None)
                with self._events_after():
                    for key, _ in ready:
                        self._read(key.fileobj, key.data)
                    self._check_limits()
                    for grammar in list(self._slow)[:MAX_SLOW]:
                        self._send_steps(grammar)
                    self.changed.notify_all()
            self._end()
        except Exception:
            log.exception("the grammars failed; they start again with the next one")
            self._end()

    def _end(self) -> None:
        """End the server and its processes, and fail everything that waits for them."""
        with self._events_after():
            waiting = dict.fromkeys([*self._queue.clear(), *self._runs.values(), *self._slow])
            for grammar in waiting:
                grammar.forget_run()
                grammar.fail("the processes of the grammars were ended")
                self._resolve(grammar, RuntimeError("the processes of the grammars were ended"))
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket):
                    key.fileobj.close()
            self._selector.close()
            if self._waker is not None:
                self._waker.close()
            if self._server is not None:
                self._server.close()
            self._cached.clear()
            self._reset()
            self.changed.notify_all()

    def _compile_next(self) -> None:
        while (grammar := self._queue.take()) is not None:
            if grammar.is_abandoned:
                self._abandon(grammar)
            else:
                self._make_room()
                self._start_run(grammar)

    def _abandon(self, grammar: GrammarProcess) -> None:
        """Do not compile what nobody waits for any more."""
        self._leave_queue(grammar)
        self._make_idle(grammar)
        grammar.compiled.clear()

    def _start_run(self, grammar: GrammarProcess) -> None:
        self._num_runs += 1
        connection = self._fork(self._num_runs)
        grammar.run, grammar.state, grammar.busy_since = self._num_runs, "compiling", time.monotonic()
        self._runs[grammar.run] = grammar
        if connection is None:
            self._lose_server()
            return
        grammar.connection = connection
        self._selector.register(grammar.connection, selectors.EVENT_READ, grammar)
        self._try(grammar, grammar.send_compile)

    def _fork(self, run: int) -> Connection | None:
        """Fork a process; return the connection to it, or None. A server that has just ended is replaced first."""
        if self._server is not None:
            try:
                return self._server.fork(run)
            except OSError:
                self._lose_server()
        try:
            self._server = ForkServerLink(self._tokenizer())
            self._selector.register(self._server.control, selectors.EVENT_READ)
            return self._server.fork(run)
        except OSError as error:
            log.warning("no process can be started for a grammar: %s", error)
            return None

    def _make_room(self) -> None:
        """End the process that was not used for longest, if there are too many. Its grammar may start again."""
        if len(self._runs) >= MAX_PROCESSES:
            not_busy = [grammar for grammar in self._runs.values() if not grammar.is_busy]
            if not_busy:
                self._make_idle(min(not_busy, key=lambda grammar: grammar.used_at))

    def _read(self, readable: object, grammar: GrammarProcess | None) -> None:
        if isinstance(readable, socket) and readable is self._wakeup:
            readable.recv(4096)
        elif grammar is not None:
            self._read_reply(grammar)
        else:
            self._read_exits()

    def _read_reply(self, grammar: GrammarProcess) -> None:
        if grammar.connection is None:
            return  # it was ended a moment ago
        try:
            message = grammar.connection.recv_bytes()
        except (EOFError, OSError):
            self._selector.unregister(grammar.connection)  # the server says how it ended
            grammar.connection.close()
            grammar.connection = None
            return
        was_compiling = grammar.state == "compiling"
        grammar.read(message)
        if was_compiling:
            self._leave_queue(grammar)
            if grammar.first_reply is not None and grammar.first_reply.error is not None:
                self._fail(grammar, grammar.first_reply.error)
                return
            grammar.state = "ready"
            self._resolve(grammar)
        self._send_steps(grammar)

    def _read_exits(self) -> None:
        assert self._server is not None
        try:
            exits = list(self._server.read_exits())
        except (EOFError, OSError):
            log.warning("the server that forks a process for each grammar has ended; it starts again")
            self._lose_server()
            return
        for number, exit_code in exits:
            grammar = self._runs.get(number)
            if grammar is not None:
                self._note_death(grammar, exit_code)

    def _lose_server(self) -> None:
        """Give up the server, whose processes end with it."""
        if self._server is not None:
            self._selector.unregister(self._server.control)
            self._server.close()
            self._server = None
        for grammar in list(self._runs.values()):
            self._note_death(grammar, -signal.SIGKILL)

    def _note_death(self, grammar: GrammarProcess, exit_code: int) -> None:
        """Decide what the end of a process means that nobody here has killed."""
        was_compiling, was_busy = grammar.state == "compiling", grammar.is_busy
        if reason := _REASONS.get(exit_code):
            self._fail(grammar, reason)
        elif exit_code == -signal.SIGPROF and not was_compiling:
            self._fail(grammar, _STEP_TIME)
        elif exit_code == -signal.SIGPROF and (longer := next_lane(grammar.lane)) is None:
            self._fail(grammar, _COMPILE_TIME)
        else:
            self._leave_queue(grammar)
            self._make_idle(grammar)
            if exit_code == -signal.SIGPROF and longer is not None:
                grammar.lane = longer
            else:
                grammar.num_deaths += was_busy
            if grammar.num_deaths >= MAX_DEATHS:
                self._fail(grammar, f"its process was ended {MAX_DEATHS} times from outside ({exit_code})")
            elif was_busy or grammar.asking:
                self._start_waiting(grammar)

    def _check_limits(self) -> None:
        now = time.monotonic()
        for grammar in list(self._runs.values()):
            if grammar.is_busy and now - grammar.busy_since > HANG_S:
                self._fail(grammar, f"it gave no answer within {HANG_S:g} s")
            elif grammar.state == "compiling" and grammar.is_abandoned:
                self._abandon(grammar)
        unused = [one for one in self._runs.values() if not one.is_busy and now - one.used_at > IDLE_S]
        for grammar in sorted(unused, key=lambda grammar: grammar.used_at)[: max(0, len(unused) - MAX_IDLE)]:
            self._make_idle(grammar)
        if sum(grammar.memory_bytes for grammar in self._runs.values()) > MAX_MEMORY_BYTES:
            largest = max(self._runs.values(), key=lambda grammar: grammar.memory_bytes)
            if largest.is_busy:
                self._fail(largest, _TOTAL_MEMORY)
            else:
                self._make_idle(largest)
