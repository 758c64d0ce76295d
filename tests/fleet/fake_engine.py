"""A worker whose engine computes nothing and takes the time of a GPU: a step has a fixed cost, and one per token.

    FLEET_STEP_S     seconds of a step without tokens
    FLEET_TOKEN_S    seconds of a token of a prompt; a generated one costs its share of the step alone
    FLEET_SPEED      divides both
    FLEET_TEXT       what it generates, over and over
    FLEET_STATS      file that gets a line per tenth of a second in which there were steps: see EngineStats
    FLEET_MACHINE    name of the machine, so that workers of one kernel count as hosts of their own

Prompts work as in tests/worker/fake.py: POISON kills the process. Results have the sizes of a real model's.
"""

import dataclasses
import os
import random
import signal
import socket
import struct
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

import msgspec

MACHINE = os.environ.get("FLEET_MACHINE", "")
if MACHINE:  # before RQ and the worker ask for them
    socket.gethostname = lambda: MACHINE
    uuid._node = zlib.crc32(MACHINE.encode())  # type: ignore[attr-defined] # the hardware address that getnode returns

from scorepool.engine import Engine, Sequence  # noqa: E402
from scorepool.worker import BatchWorker  # noqa: E402
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer, FakeWorker  # noqa: E402

STEP_S = float(os.environ.get("FLEET_STEP_S", "0.02"))
TOKEN_S = float(os.environ.get("FLEET_TOKEN_S", "0.00005"))
SPEED = float(os.environ.get("FLEET_SPEED", "1"))
TEXT = os.environ.get("FLEET_TEXT", "x").encode()
VOCAB_SIZE = 320  # then 1,000 tokens with 20 top_logprobs each are a result of 190 KB
STATS_EVERY_S = 0.1
OnStep = Callable[[list[Sequence]], object]


class WordTokenizer(FakeTokenizer):
    """Bytes, and words of one letter above them."""

    vocab_size = VOCAB_SIZE

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id if token_id < 256 else ord("a") + token_id % 26])


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def top_of(rng: random.Random) -> tuple[list[int], list[float]]:
    ids = rng.sample(range(VOCAB_SIZE), 20)
    return ids, sorted((float32(-rng.expovariate(0.2)) for _ in ids), reverse=True)


TOPS = [top_of(random.Random(seed)) for seed in range(256)]  # numbers as a model gives them, in their full length


def write_entry(row: Sequence, position: int) -> None:
    """Append the entry of one token to the columns that were asked for."""
    columns = row.columns
    ids, logprobs = TOPS[(row.token_ids[position] * 31 + position) % len(TOPS)]
    columns.logprobs.append(None if position == 0 else logprobs[position % 20])
    if row.top_logprobs:
        columns.top_ids.append([] if position == 0 else ids[: row.top_logprobs])
        columns.top_logprobs.append([] if position == 0 else logprobs[: row.top_logprobs])


@dataclass(eq=False, slots=True)
class Group:
    """The sequences of one job."""

    future: "Future[list[Sequence]]"
    sequences: list[Sequence]
    on_step: OnStep | None
    num_left: int  # that are not done


class Row:
    """A sequence in the batch."""

    def __init__(self, sequence: Sequence, group: Group) -> None:
        self.sequence = sequence
        self.group = group
        self.num_prefill_left = sequence.num_input_tokens

    @property
    def is_done(self) -> bool:
        return self.num_prefill_left == 0 and self.sequence.is_done

    def advance(self, num_tokens: int) -> bool:
        """Take the row a step on. Return whether it has new entries."""
        sequence = self.sequence
        if self.num_prefill_left:
            self.num_prefill_left -= num_tokens
            if self.num_prefill_left or sequence.score_from is None:
                return False
            if bytes(token for token in sequence.token_ids[:8] if token < 256).startswith(b"POISON"):
                os.kill(os.getpid(), signal.SIGKILL)
            for position in range(sequence.score_from, len(sequence.token_ids)):
                write_entry(sequence, position)
            return True
        assert sequence.sampling is not None
        token_id = TEXT[sequence.num_generated % len(TEXT)]
        sequence.token_ids.append(token_id)
        sequence.text.append(token_id)
        write_entry(sequence, len(sequence.token_ids) - 1)
        if sequence.num_generated >= sequence.sampling.max_tokens:
            sequence.finish_reason = "length"
        return True


class EngineStats(msgspec.Struct, kw_only=True):
    """Sums since the engine's start, at one moment."""

    at: float = 0.0  # time.monotonic()
    steps: int = 0
    row_steps: int = 0  # rows of each step, added up
    tokens: int = 0
    busy_s: float = 0.0


class PacedEngine(FakeEngine):
    """Run rows in one batch: at most `max_rows` at once, and at most `max_tokens` in a step."""

    model_info = dataclasses.replace(FakeEngine.model_info, context_length=32_768, vocab_size=VOCAB_SIZE)

    def __init__(self, max_rows: int, max_tokens: int, speed: float = SPEED) -> None:
        self._max_rows, self._max_tokens, self._speed = max_rows, max_tokens, speed
        self._changed = Condition()  # guards the arrivals and the end
        self._arrivals: list[Group] = []
        self._is_closed = False
        self._waiting: deque[Row] = deque()  # these are the engine thread's own
        self._running: list[Row] = []
        self._stats = EngineStats()
        self._stats_path = Path(os.environ["FLEET_STATS"]) if "FLEET_STATS" in os.environ else None
        self.tokenizer = WordTokenizer()
        self.chat = FakeChatCodec(self.tokenizer)
        Thread(target=self._run, name="engine", daemon=True).start()

    def add(self, sequences: list[Sequence], on_step: OnStep | None = None) -> "Future[list[Sequence]]":
        group = Group(Future(), sequences, on_step, len(sequences))
        with self._changed:
            self._arrivals.append(group)
            self._changed.notify()
        return group.future

    def cancel(self, future: "Future[list[Sequence]]") -> None:
        future.cancel()  # its rows leave before the next step

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._arrivals or self._waiting or self._running):
                    self._write_stats()
                self._changed.wait_for(lambda: self._arrivals or self._waiting or self._running or self._is_closed)
                if self._is_closed:
                    return
                arrivals, self._arrivals = self._arrivals, []
            self._waiting += [Row(sequence, group) for group in arrivals for sequence in group.sequences]
            self._step()

    def _step(self) -> None:
        self._running = [row for row in self._running if not row.group.future.cancelled()]
        while self._waiting and len(self._running) < self._max_rows:
            row = self._waiting.popleft()
            if not row.group.future.cancelled():
                self._running.append(row)
        if not self._running:
            return
        slices = self._schedule()
        num_tokens = sum(num for _, num in slices)
        self.step_started_at = time.monotonic()
        seconds = (STEP_S + TOKEN_S * num_tokens) / self._speed
        time.sleep(seconds)
        self._commit(slices)
        self.step_started_at = None
        stats = self._stats
        stats.steps += 1
        stats.row_steps += len(slices)
        stats.tokens += num_tokens
        stats.busy_s += seconds
        if time.monotonic() - stats.at >= STATS_EVERY_S:
            self._write_stats()

    def _schedule(self) -> list[tuple[Row, int]]:
        """Return the rows of a step with their tokens: one of each that generates, then prompts while there is room."""
        left = self._max_tokens
        slices = []
        for row in sorted(self._running, key=lambda row: row.num_prefill_left > 0):
            num = min(row.num_prefill_left or 1, left)
            if num:
                slices.append((row, num))
                left -= num
        return slices

    def _commit(self, slices: list[tuple[Row, int]]) -> None:
        advanced: dict[Group, list[Sequence]] = {}
        for row, num in slices:
            if row.advance(num):
                advanced.setdefault(row.group, []).append(row.sequence)
        self._running = [row for row in self._running if not row.is_done]
        for group, sequences in advanced.items():
            if group.on_step is not None:
                group.on_step(sequences)
            group.num_left -= sum(sequence.is_done for sequence in sequences)
            if group.num_left == 0 and group.future.set_running_or_notify_cancel():
                group.future.set_result(group.sequences)

    def _write_stats(self) -> None:
        self._stats.at = time.monotonic()
        if self._stats_path is not None:
            with self._stats_path.open("ab") as file:
                file.write(msgspec.json.encode(self._stats) + b"\n")


class FleetWorker(FakeWorker):
    """A worker with the paced engine."""

    def start_engine(self, source: str) -> Engine:
        return PacedEngine(self.settings.max_running_rows, self.settings.max_batch_tokens)


class ModelWorker(BatchWorker):
    """A worker with a real model, as a host of its own."""
