"""Compile grammars and find bitmasks, in one process per grammar. Runs as a script; imports llguidance and no MLX.

The server holds the tokenizer and forks: a fork takes milliseconds and shares its memory. It has one thread, so that a
fork is safe. A forked process answers about one grammar, on a socket of its own, until that socket is closed or a limit
ends it:

    time     SIGPROF ends the process when a call has taken its CPU time, whatever it is doing
    memory   EXIT_MEMORY, or SIGABRT where the system refuses more

Only numbers and bytes cross the sockets. What a client wrote is in a grammar, and nowhere else.
"""

import gc
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# From and to the server. Every request to fork carries the socket of the new process.
LENGTH = struct.Struct("<Q")  # of the tokenizer, which comes first
COMMAND = struct.Struct("<cI")  # FORK or KILL, number of the process
EXITED = struct.Struct("<Ii")  # number of the process, how it ended, as os.waitstatus_to_exitcode
FORK, KILL = b"F", b"K"

# From and to the process of a grammar.
COMPILE = struct.Struct("<dI")  # seconds of CPU time, niceness; then the grammar
# Number of the sequence, number of new tokens, of proposed tokens after them; then the tokens as 32-bit numbers.
STEP = struct.Struct("<III")
# Kind, number of the sequence, bytes of memory, is slow, number of bitmasks; then these, or the error.
REPLY = struct.Struct("<cIQ?I")
# ENDED: only an end token may follow what the bitmasks are about. There is a bitmask for each proposed token that may
# follow, beside the first.
BITMASK, ENDED, ERROR = b"B", b"E", b"X"
FORGET = 0xFFFFFFFF  # in place of a number of new tokens: the sequence is over

EXIT_MEMORY = 3
LOW_PRIORITY = 15  # added to the niceness of what takes long
SLOW_S = 0.05  # of CPU time in all steps, beside SLOW_PER_STEP_S each, after which a grammar is slow
SLOW_PER_STEP_S = 0.002
STEP_S = 0.5  # of CPU time in one step
SPENT_S = 1.0  # of CPU time, that all steps of a grammar may take beyond SPENT_PER_STEP_S each
SPENT_PER_STEP_S = 0.02
MEMORY_BYTES = 384 * 2**20
THREAD_ADDRESS_SPACE_BYTES = 256 * 2**20  # that a second thread reserves and does not use
MAX_ERROR_BYTES = 4_000

# What llguidance bounds itself. The time to make a matcher grows with the square of the grammar's symbols: two seconds
# at this limit. A state of the lexer takes 1 to 2 KB.
_LIMITS = LLParserLimits(max_grammar_size=20_000, max_lexer_states=50_000)


class Grammar:
    """One grammar, the matchers of its sequences, and the account of its time."""

    def __init__(self, connection: Connection, tokenizer: LLTokenizer) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._base_bytes = peak_memory_bytes()
        self._matcher: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}
        self._spent_s = 0.0
        self._num_steps = 0
        self._is_slow = False

    def serve(self) -> None:
        """Compile what comes first, then answer steps until the other side is gone."""
        try:
            self._compile(self._connection.recv_bytes())
            while True:
                message = memoryview(self._connection.recv_bytes())
                while message:
                    message = self._step(message)
        except (EOFError, OSError):
            pass

    def _compile(self, message: bytes) -> None:
        limit_s, niceness = COMPILE.unpack_from(message)
        os.nice(niceness)
        threading.Thread(target=self._watch_memory, daemon=True).start()
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        grammar = LLMatcher.grammar_from_lark(message[COMPILE.size :].decode())
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        self._answer(0, matcher)  # its first bitmask finds some errors, and takes longest
        self._matcher = matcher

    def _step(self, message: memoryview) -> memoryview:
        """Answer the first step of a message; return the rest."""
        sequence, num_new, num_proposed = STEP.unpack_from(message)
        rest = message[STEP.size :]
        if num_new == FORGET:
            self._matchers.pop(sequence, None)
            return rest
        num_tokens = num_new + num_proposed
        tokens, rest = rest[: num_tokens * 4].cast("I"), rest[num_tokens * 4 :]
        if sequence not in self._matchers and self._matcher is not None:
            self._matchers[sequence] = self._matcher.deep_copy()
        matcher = self._matchers[sequence]
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, STEP_S)
        for token_id in tokens[:num_new]:
            if matcher.is_stopped() or not matcher.consume_token(token_id):
                break
        self._num_steps += num_new
        self._answer(sequence, matcher, tokens[num_new:])
        self._charge(time.process_time() - began_s)
        return rest

    def _charge(self, spent_s: float) -> None:
        self._spent_s += spent_s
        if not self._is_slow and self._spent_s > SLOW_S + SLOW_PER_STEP_S * self._num_steps:
            self._is_slow = True
            os.nice(LOW_PRIORITY)
        if self._spent_s > SPENT_S + SPENT_PER_STEP_S * self._num_steps:
            os.kill(os.getpid(), signal.SIGPROF)

    def _answer(self, sequence: int, matcher: LLMatcher, proposed: Sequence[int] = ()) -> None:
        """Send what may follow, and what may follow after each of the proposed tokens that may."""
        bitmasks = [] if matcher.is_stopped() else [matcher.compute_bitmask()]
        has_ended = not bitmasks
        if proposed and bitmasks and not matcher.is_error():
            has_ended = self._foresee(matcher, proposed, bitmasks)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if (memory := self._memory()) > MEMORY_BYTES:
            os._exit(EXIT_MEMORY)
        kind, payload = (ENDED if has_ended else BITMASK), b"".join(bitmasks)
        if matcher.is_error():
            kind, payload = ERROR, matcher.get_error().encode()[:MAX_ERROR_BYTES]
        self._connection.send_bytes(REPLY.pack(kind, sequence, memory, self._is_slow, len(bitmasks)) + payload)

    def _foresee(self, matcher: LLMatcher, proposed: Sequence[int], bitmasks: list[bytes]) -> bool:
        """Append the bitmask after each proposed token, up to one that may not follow or that the grammar fails at.

        Return True if only an end token may follow the last one. The matcher stays where it is.
        """
        ahead = matcher.deep_copy()
        for token_id in proposed:
            signal.setitimer(signal.ITIMER_PROF, STEP_S)
            if not ahead.try_consume_tokens([token_id]):
                break
            self._num_steps += 1
            if ahead.is_stopped():
                return not ahead.is_error()
            bitmask = ahead.compute_bitmask()
            if ahead.is_error():
                break
            bitmasks.append(bitmask)
        return False

    def _memory(self) -> int:
        return max(0, peak_memory_bytes() - self._base_bytes)

    def _watch_memory(self) -> None:
        """End the process when it takes too much memory. Where the system enforces no limit, nothing else does."""
        while self._matcher is None:
            if self._memory() > MEMORY_BYTES:
                os._exit(EXIT_MEMORY)
            time.sleep(0.02)


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Server:
    """Fork a process for each grammar, kill them on demand, and say how each of them ended."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._pids: dict[int, int] = {}  # by number of the process
        self._wakeup, self._signaled = socket.socketpair()
        self._wakeup.setblocking(False)
        self._signaled.setblocking(False)

    def serve(self) -> None:
        """Obey until the other side is gone, then end every process."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signaled.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                ready, _, _ = select.select([self._control, self._wakeup], [], [])
                if self._wakeup in ready:
                    self._wakeup.recv(4096)
                    self._reap()
                if self._control in ready and not self._obey():
                    break
        except ConnectionError:
            pass  # the other side is gone
        finally:
            signal.set_wakeup_fd(-1)
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Carry out one command. Return False if there will be no more."""
        message, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(message) < COMMAND.size:
            return False
        command, number = COMMAND.unpack(message)
        if command == FORK:
            self._fork(number, descriptors[0])
        elif number in self._pids:
            os.kill(self._pids[number], signal.SIGKILL)
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        try:
            pid = os.fork()
        except OSError:  # the system has no process or memory left: the others go on
            os.close(descriptor)
            self._control.sendall(EXITED.pack(number, -signal.SIGKILL))
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (self._control, self._wakeup, self._signaled):
                one.close()
            _confine()
            Grammar(Connection(descriptor), self._tokenizer).serve()
            os._exit(0)
        self._pids[number] = pid
        os.close(descriptor)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if (ended := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                del self._pids[number]
                self._control.sendall(EXITED.pack(number, os.waitstatus_to_exitcode(ended[1])))


def _confine() -> None:
    """Limit what the process of a grammar may take, and let it print nothing: it could print what a client wrote."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = address_space + MEMORY_BYTES + THREAD_ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)


def main() -> None:
    """Read the tokenizer from the control socket, which is standard input, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine's process decides
    control = socket.socket(fileno=0)
    with control.makefile("rb", buffering=0) as stream:
        message = json.loads(_read(stream, *LENGTH.unpack(_read(stream, LENGTH.size))))
    tokenizer = LLTokenizer(message["tokenizer"], eos_token=message["eos_ids"])
    gc.collect()
    gc.freeze()  # else the collector of each forked process touches, and so copies, all objects
    Server(control, tokenizer).serve()


def _read(stream: io.RawIOBase, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        if not (piece := stream.read(num_bytes - len(found))):
            sys.exit(0)
        found += piece
    return bytes(found)


if __name__ == "__main__":
    main()
