"""A real worker with a fake engine, which counts steps and fails or hangs if the prompt says so.

One token is one byte of the prompt. A generate job takes `max_tokens` steps of FAKE_STEP_S seconds. The clock of the
process is FAKE_CLOCK_AHEAD_S seconds ahead. Its weights have the fingerprint FAKE_FINGERPRINT. It looks for crosschecks
every FAKE_CROSSCHECK_POLL_S seconds.
"""

import dataclasses
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import rq.utils
from redis import Redis
from rq import get_current_job

import scorepool.store.clock
from scorepool.engine import ChatCodec, Engine, EngineStats, ModelInfo, NonFiniteLogits, Sequence, Tokenizer
from scorepool.engine.errors import EngineDeadError
from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.store.result_store import ResultStore, open_result_store
from scorepool.worker import BatchWorker, Job, Queue, WebhookWorker
from scorepool.worker.inference import crosschecker
from scorepool.worker.inference.text_lengths import Steps
from scorepool.worker.machine import keep_awake
from scorepool.worker.rq.clock import REDIS_CLOCK
from scorepool.worker.rq.result_writer import ResultWriter

T = TypeVar("T")

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.005"))
AHEAD_S = float(os.environ.get("FAKE_CLOCK_AHEAD_S", "0"))
crosschecker.POLL_S = float(os.environ.get("FAKE_CROSSCHECK_POLL_S", crosschecker.POLL_S))


class WrongDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return super().now(tz) + datetime.timedelta(seconds=AHEAD_S)


if AHEAD_S:
    right = time.time
    time.time = lambda: right() + AHEAD_S
    rq.utils.datetime = SimpleNamespace(**vars(datetime) | {"datetime": WrongDatetime})  # the clock of rq.utils.now
    REDIS_CLOCK.__init__()  # as in a process whose clock was wrong from its start


def finish(steps: Steps[T]) -> T:
    """Run all steps of a translation at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class FakeTokenizer(Tokenizer):
    eos_ids = frozenset({256})
    bos_id = 257
    vocab_size = 258
    max_token_bytes = 1
    special_token_ids: frozenset[int] = frozenset()
    bos_token, eos_token, pad_token = "<s>", "</s>", None

    def __init__(self) -> None:
        self._suffix: list[int] = []

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        if text == "BUG":
            raise RuntimeError(f"a bug met {text}")
        if text == "ENDLESS":
            time.sleep(3600)
        return ([257] if add_bos else []) + [*text.encode()], add_bos

    def encode_pair(self, prompt: str, completion: str, num_fixed: int = 0) -> tuple[list[int], int, bool]:
        kept = prompt.rstrip(" ")
        ids = [257, *kept.encode()]
        return ids + list((prompt[len(kept) :] + completion).encode()), len(ids), True

    def digest(self) -> str:
        return "fake"

    def bytes_of(self, token_ids: Iterable[int]) -> list[bytes]:
        return [*map(self.token_bytes, token_ids)]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class PlainTemplate:
    source = None

    def render(
        self, messages: list[dict[str, object]], tools: object = (), variables: object = None
    ) -> tuple[str, str]:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages), ""

    def accepts_variable(self, name: str) -> bool:
        return False


class FakeChatCodec(ChatCodec):
    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.images = None
        self.template = PlainTemplate()
        self.chat_format = ChatFormat(
            transitions={}, special_token_ids=tokenizer.special_token_ids, eos_ids=tokenizer.eos_ids
        )

    def encode_rendered(self, text: str, generation_prompt: str) -> tuple[list[int], list[int]]:
        return self.tokenizer.encode(text)[0], []


class FakeEngine(Engine):
    model_info = ModelInfo(
        fingerprint=os.environ.get("FAKE_FINGERPRINT", "f" * 64),
        dtype="float32",
        quantization=None,
        adapter=None,
        mode="default",
        backend="fake",
        versions={"mlx": "0", "mlx-lm": "0"},
        context_length=4096,
        max_cached_tokens=1_000_000,
        vocab_size=258,
        self_test="passed",
    )
    step_started_at: float | None = None
    load = (0, 0)
    stats = EngineStats()
    is_loaded = True

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.chat = FakeChatCodec(self.tokenizer)
        self.active: dict[Future[list[Sequence]], list[Sequence]] = {}
        self.lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, sequences: list[Sequence], on_step: object = None) -> "Future[list[Sequence]]":
        future: Future[list[Sequence]] = Future()
        with self.lock:
            self.active[future] = sequences
        return future

    def cancel(self, future: "Future[list[Sequence]]") -> None:
        with self.lock:
            self.active.pop(future, None)
        future.cancel()

    def close(self) -> None:
        pass

    def _run(self) -> None:
        while True:
            self.step_started_at = None
            time.sleep(STEP_S)
            with self.lock:
                groups = list(self.active.items())
            self.step_started_at = time.monotonic()
            done = [(future, group) for future, group in groups if self._step_all(group)]
            for future, group in done:
                with self.lock:
                    self.active.pop(future, None)
                if future.cancelled():
                    continue
                prompt = bytes(token for token in group[0].token_ids if token < 256)
                if prompt.startswith(b"NAN"):
                    future.set_exception(NonFiniteLogits("the logits are NaN"))
                elif prompt.startswith(b"FAULT"):
                    future.set_exception(EngineDeadError("the engine failed"))
                else:
                    future.set_result(group)

    def _step_all(self, group: list[Sequence]) -> bool:
        return min([self._step(row) for row in group])

    def score(self, score_from: int, reported: list[int]) -> list[float | None]:
        return [None if score_from == 0 and i == 0 else -0.5 for i in range(len(reported))]

    def _step(self, row: Sequence) -> bool:
        prompt = bytes(token for token in row.token_ids if token < 256)
        if prompt.startswith(b"POISON"):
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.startswith(b"STALL"):
            time.sleep(3600)
        if row.sampling is None:
            reported = row.token_ids[row.score_from :]
            row.columns.logprobs = self.score(row.score_from, reported)
            row.columns.top_ids = [list(range(row.top_logprobs)) for _ in reported]
            row.columns.top_logprobs = [[-0.5] * row.top_logprobs for _ in reported]
            return True
        row.token_ids.append(ord("x"))
        row.columns.logprobs.append(-0.5)
        row.finish_reason = "length"
        return len(row.columns.logprobs) >= row.sampling.max_tokens


class FakeWorker(BatchWorker):
    def start_engine(self, source: str) -> Engine:
        return FakeEngine()


class FakeWebhookWorker(WebhookWorker):
    """A real webhook worker in a process whose clock may be wrong."""


class SlowTokenizer(FakeTokenizer):
    """A tokenizer that takes 2 us a character, without the GIL."""

    def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
        time.sleep(2e-6 * len(text))
        return super().encode(text, add_bos)

    def encode_pair(self, prompt: str, completion: str, num_fixed: int = 0) -> tuple[list[int], int, bool]:
        time.sleep(2e-6 * (2 * len(prompt) + len(completion)))
        return super().encode_pair(prompt, completion)


class SlowTokenizerEngine(FakeEngine):
    model_info = dataclasses.replace(FakeEngine.model_info, context_length=10_000_000)

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = SlowTokenizer()
        self.chat = FakeChatCodec(self.tokenizer)


class SlowTokenizerWorker(BatchWorker):
    def start_engine(self, source: str) -> Engine:
        return SlowTokenizerEngine()


class LyingEngine(FakeEngine):
    """An engine that is 0.25 nats off at the last token of every sequence that it scores."""

    def score(self, score_from: int, reported: list[int]) -> list[float | None]:
        logprobs = super().score(score_from, reported)
        return [*logprobs[:-1], -0.75]


class WaveringEngine(LyingEngine):
    """An engine that is off only when it scores a sequence for the first time."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()
        super().__init__()

    def score(self, score_from: int, reported: list[int]) -> list[float | None]:
        if tuple(reported) in self.known:
            return FakeEngine.score(self, score_from, reported)
        self.known.add(tuple(reported))
        return super().score(score_from, reported)


class LyingWorker(FakeWorker):
    def start_engine(self, source: str) -> Engine:
        return LyingEngine()


class WaveringWorker(FakeWorker):
    def start_engine(self, source: str) -> Engine:
        return WaveringEngine()


class HangingWorker(FakeWorker):
    """A worker whose loop hangs when a job has ended."""

    def _commit_ended(self) -> None:
        if any(inflight.is_over for inflight in self.in_flight.values()):
            time.sleep(3600)
        super()._commit_ended()


class EndlessStartWorker(FakeWorker):
    """A worker whose model is never loaded."""

    def open(self) -> None:
        time.sleep(3600)


class LateHeartbeatWorker(FakeWorker):
    """A worker with a slow start and a late second heartbeat."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_heartbeats = 0

    def open(self) -> None:
        super().open()
        time.sleep(0.8 * self.settings.lease_s)

    def _send_heartbeat(self) -> None:
        super()._send_heartbeat()
        self.num_heartbeats += 1
        if self.num_heartbeats == 1:
            time.sleep(self.settings.lease_s)


class SleepingWorker(FakeWorker):
    """A worker on a machine that sleeps for eight hours at each SIGUSR2: only the clock that goes on shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slept_s = 0.0
        clock = scorepool.store.clock
        clock.time = SimpleNamespace(
            time=time.time,
            monotonic=time.monotonic,
            clock_gettime=lambda which: time.clock_gettime(which) + self.slept_s,
        )
        signal.signal(signal.SIGUSR2, self.sleep)

    def sleep(self, signum: int, frame: object) -> None:
        self.slept_s += 8 * 3600


class NappingWorker(FakeWorker):
    """A worker whose Mac is about to sleep at SIGUSR1 and awake again at SIGUSR2."""

    def open(self) -> None:
        super().open()
        for number, call in ((signal.SIGUSR1, self.hand_back_for_sleep), (signal.SIGUSR2, self.resume_after_sleep)):
            signal.signal(number, lambda *_, call=call: threading.Thread(target=call).start())


class LoggingEngineWorker(FakeWorker):
    def start_engine(self, source: str) -> Engine:
        log = logging.getLogger("scorepool.engine")
        log.info("the engine has started")
        log.warning("the engine has a warning")
        return super().start_engine(source)


class MacWorker(FakeWorker):
    """A worker that takes this machine for a Mac when it decides whether to keep it awake."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keep_awake.sys = SimpleNamespace(platform="darwin")  # type: ignore[attr-defined]
        super().__init__(*args, **kwargs)


def note(job: Job, connection: Redis, *about: object) -> None:
    connection.rpush(f"noted:{job.id}", *[type(thing).__name__ for thing in about] or ["stopped"])


def show_status(job: Job, connection: Redis, *about: object) -> None:
    connection.set(f"shown:{job.id}", job.get_status(refresh=False))


def note_current(job: Job, connection: Redis, *about: object) -> None:
    connection.set(f"current:{job.id}", getattr(get_current_job(), "id", "none"))


def flaky(job: Job) -> str:
    if job.connection.incr(f"tries:{job.id}") < 3:
        raise ValueError("not yet")
    return "at last"


def break_queue(job: Job, queue: str) -> str:
    """Give the key of a queue a wrong type. Fail if it is the job's own queue and the first run."""
    if job.connection.incr(f"tries:{job.id}") == 1:
        job.connection.set(f"rq:queue:{queue}", "wrong")
        if queue == job.origin:
            raise ValueError("not yet")
    return "at last"


class FunctionsWorker(FakeWorker):
    """A worker that also runs plain RQ functions."""

    def open(self) -> None:
        super().open()
        self.functions |= {
            "add": lambda job: sum(job.args),
            "break_queue": lambda job: break_queue(job, *job.args),
            "current": lambda job: getattr(get_current_job(), "id", None),
            "flaky": flaky,
            "sleep": lambda job: time.sleep(job.args[0]),
        }
        self.callbacks |= {"note": note, "show_status": show_status, "note_current": note_current}


class CrashBeforeDependentsWorker(FunctionsWorker):
    """A worker that dies just before it puts the dependents of an ended job on their queues."""

    def open(self) -> None:
        super().open()
        Queue.enqueue_dependents = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


class DyingStore:
    """A result store that kills the process once an object is written."""

    def __init__(self, store: ResultStore) -> None:
        self.store = store

    def put(self, path: str, body: bytes) -> None:
        self.store.put(path, body)
        os.kill(os.getpid(), signal.SIGKILL)


class DyingStoreWorker(FakeWorker):
    """A worker that is killed between the write of a result to the result store and the end of its job."""

    @cached_property
    def result_store(self) -> Any:
        return DyingStore(open_result_store(self.settings))


class ImpatientWorker(FakeWorker):
    """A worker that gives up a result that the result store has not taken for half a second."""

    @cached_property
    def result_writer(self) -> ResultWriter:
        writer = super().result_writer
        writer.give_up_s = 0.5
        return writer
